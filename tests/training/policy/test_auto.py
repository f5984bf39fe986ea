"""The automatic frequency on paper: inside the bound, quick to yield to interference, back afterwards, never fooled."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.training.policy.auto import Auto
from tests.training.policy.world import World


def steady(seconds: float, jitter: float = 0.02) -> Any:
    return lambda now, dice: seconds * max(0.2, dice.gauss(1, jitter))


def settled(world: World) -> float:
    """The interval in force."""
    assert world.tempo.chosen is not None
    return world.tempo.chosen.seconds


def test_a_checkpoint_that_costs_an_iteration_comes_every_twenty_at_five_percent() -> None:
    world = World(steady(1.0, 0.0), stall=lambda now: 1.0, durable=lambda now: 1.0, wishes=Auto(overhead=0.05)).run(400)
    assert settled(world) == pytest.approx(20, rel=0.02)
    assert world.overhead < 0.06


def test_free_checkpoints_come_as_fast_as_storage_takes_them() -> None:
    world = World(steady(0.2), durable=lambda now: 4.0, wishes=Auto(overhead=0.05)).run(3000)
    assert world.tempo.chosen is not None and world.tempo.chosen.term == "storage"
    assert settled(world) == pytest.approx(4.0, rel=0.2)
    assert len(world.triggers) > 3000 * 0.2 / 4.0 * 0.7


@settings(deadline=None, max_examples=60)
@given(
    iteration=st.floats(0.01, 5.0),
    jitter=st.floats(0.0, 0.15),
    stall=st.floats(0.0, 20.0),
    slowed=st.floats(0.0, 0.5),
    durable=st.floats(0.01, 30.0),
    bound=st.sampled_from([0.01, 0.035, 0.1]),
    seed=st.integers(0, 1000),
)
def test_the_measured_overhead_stays_near_the_bound(
    iteration: float, jitter: float, stall: float, slowed: float, durable: float, bound: float, seed: int
) -> None:
    world = World(
        steady(iteration, jitter),
        stall=lambda now: stall,
        slowed=lambda now: slowed,
        durable=lambda now: durable,
        wishes=Auto(overhead=bound),
        seed=seed,
    ).run(4000)
    one = stall + slowed * (durable + iteration)
    assert world.overhead <= bound + 0.01 + 3 * one / world.clean, "the first ones, before anything is known, are extra"


def test_warm_up_does_not_count() -> None:
    def iteration(now: float, dice: random.Random) -> float:
        return 5.0 if now < 14 else 0.1 * dice.gauss(1, 0.02)

    world = World(iteration, stall=lambda now: 0.1, durable=lambda now: 0.5).run(3000)
    assert settled(world) == pytest.approx(0.1 / 0.035, rel=0.25)


@pytest.mark.parametrize("iterations", [20, 60, 99])
def test_short_runs_have_checkpoints_too(iterations: int) -> None:
    assert World(steady(0.1), stall=lambda now: 0.01, durable=lambda now: 0.1).run(iterations).triggers


@pytest.mark.parametrize(
    "iteration",
    [
        lambda now, dice: dice.choice([0.1, 0.3]),
        lambda now, dice: dice.expovariate(10) + 0.05,
        lambda now, dice: 0.1 + 0.4 * (dice.random() < 0.1),
        lambda now, dice: 20.0 if dice.random() < 0.01 else 0.1,
    ],
    ids=["bimodal", "heavy tail", "buckets", "evaluations"],
)
def test_variable_iterations_stay_inside_the_bound_and_are_not_blamed_on_checkpoints(iteration: Any) -> None:
    world = World(iteration, stall=lambda now: 0.05, durable=lambda now: 1.0).run(20_000)
    assert world.overhead <= 0.045
    assert settled(world) <= 25, "noise must not keep checkpoints away (1.4 s would do)"


def test_a_slower_model_is_not_blamed_on_checkpoints() -> None:
    def iteration(now: float, dice: random.Random) -> float:
        return (0.1 if now < 300 else 0.12) * dice.gauss(1, 0.02)

    world = World(iteration, stall=lambda now: 0.1, durable=lambda now: 1.0).run(9000)
    assert settled(world) == pytest.approx(0.1 / 0.035, rel=0.1)
    assert max((seconds for at, seconds in world.intervals if at > 300), default=0.0) < 1.25 * 0.1 / 0.035


def hit(before: float, meanwhile: float, begin: float = 500, end: float = 1500) -> Any:
    return lambda now: meanwhile if begin <= now < end else before


@pytest.mark.parametrize(
    "change",
    [{"durable": hit(1.0, 20.0)}, {"slowed": hit(0.05, 0.6), "durable": lambda now: 2.0}, {"stall": hit(0.05, 0.8)}],
    ids=["disk", "cpu", "stall"],
)
def test_interference_raises_the_interval_within_two_and_lets_it_come_back(change: dict[str, Any]) -> None:
    costs: dict[str, Any] = {"stall": lambda now: 0.05, "durable": lambda now: 1.0, **change}
    world = World(steady(0.1), **costs)
    while world.now < 500:
        world.run(1)
    quiet, taken = settled(world), len(world.triggers)
    while world.now < 1500:
        world.run(1)
    raised = next(at for at, seconds in world.intervals if at > 500 and seconds > 1.5 * quiet)
    during = [at for at in world.triggers[taken:] if at < raised]
    assert len(during) <= 3, "two that suffer, and the one that was under way"
    busy = settled(world)
    assert busy > 2 * quiet
    world.run(12_000)
    assert settled(world) == pytest.approx(quiet, rel=0.35)


def test_a_known_failure_rate_makes_them_rarer() -> None:
    world = World(steady(0.5), stall=lambda now: 0.2, durable=lambda now: 4.0, mtbf=3600.0).run(3000)
    assert world.tempo.chosen is not None and world.tempo.chosen.term == "failures"
    assert settled(world) == pytest.approx((2 * 0.2 * 3600) ** 0.5, rel=0.15)


def test_control_without_a_pause_for_clean_iterations_costs_are_never_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is always busy leaves nothing to compare with, so one checkpoint is put off now and then."""
    world = World(steady(0.2), slowed=lambda now: 0.3, durable=lambda now: 3.0).run(2000)
    assert world.overhead <= 0.06
    monkeypatch.setattr("stepwell.training.policy.profile.Profile.is_resting", False)
    monkeypatch.setattr("stepwell.training.policy.auto._UNKNOWN_SECONDS", 0.0)
    assert World(steady(0.2), slowed=lambda now: 0.3, durable=lambda now: 3.0).run(2000).overhead > 0.2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overhead": 0}, "overhead=0"),
        ({"overhead": 3.5}, "0.035 for 3.5 %"),
        ({"mtbf": 0}, "mtbf=0"),
        ({"recovery_point": -1}, "recovery_point=-1"),
    ],
)
def test_wishes_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Auto(**options)


def test_it_says_why() -> None:
    world = World(steady(1.0, 0.0), stall=lambda now: 1.0, wishes=Auto(overhead=0.05, recovery_point=3)).run(400)
    text = world.tempo.explain()
    assert "Saving every 20 steps (20 s): a save costs 1 s" in text
    assert "Not met: cannot limit lost work to 3 s" in text
