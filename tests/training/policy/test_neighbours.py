"""Neighbours that come and go, on paper: what each phase costs, and where the interval is at its end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.training.policy.world import World

BOUND = 0.035
COMES, LEAVES, ENDS = 30.0, 45.0, 60.0
Beside = Callable[[float], bool]


def beside(now: float) -> bool:
    """One neighbour, once."""
    return COMES <= now < LEAVES


def again_and_again(now: float) -> bool:
    """The same, every 30 seconds."""
    return now >= COMES and now % 30 < 15


def either(quiet: float, meanwhile: float, is_there: Beside = beside) -> Callable[[float], float]:
    return lambda now: meanwhile if is_there(now) else quiet


class Noise:
    """Iterations with two kinds of noise: each for itself, and one that lasts for about ten."""

    def __init__(self, mean: Callable[[float], float], jitter: Callable[[float], float]) -> None:
        self._mean, self._jitter, self._drift = mean, jitter, 0.0

    def __call__(self, now: float, dice: random.Random) -> float:
        width = self._jitter(now)
        self._drift = 0.9 * self._drift + dice.gauss(0, 0.4 * width)
        return self._mean(now) * max(0.3, 1 + self._drift + dice.gauss(0, width))


def interval(world: World) -> float:
    assert world.tempo.chosen is not None
    return world.tempo.chosen.seconds


def run_until(world: World, moment: float) -> float:
    """Returns what checkpoints took from then on, as a share."""
    now, clean = world.now, world.clean
    while world.now < moment:
        world.run(1)
    return (world.now - now) / (world.clean - clean) - 1


def suffered(world: World, quiet: float, *, since: float = COMES) -> int:
    """Checkpoints begun beside the neighbour until the interval was longer by half."""
    raised = next(at for at, seconds in world.intervals if at > since and seconds > 1.5 * quiet)
    return sum(since < at < raised for at in world.triggers)


def on_disk(is_there: Beside = beside, **changes: Any) -> dict[str, Any]:
    """What an H200 showed: a tenth of the disk is left, and iterations do not change."""
    return {
        "iteration": Noise(lambda now: 0.0715, lambda now: 0.01),
        "durable": either(0.46, 4.0, is_there),
        **changes,
    }


def on_gpu(is_there: Beside = beside, **changes: Any) -> dict[str, Any]:
    """The same: iterations take 2.29 times as long and become uneven; a checkpoint takes nothing from either."""
    return {
        "iteration": Noise(either(0.0715, 0.163, is_there), either(0.01, 0.05, is_there)),
        "durable": lambda now: 0.46,
        **changes,
    }


def on_cores(is_there: Beside = beside, **changes: Any) -> dict[str, Any]:
    """Training on the CPU: iterations take twice as long, and copying waits for a core."""
    return {
        "iteration": Noise(either(0.02, 0.04, is_there), lambda now: 0.03),
        "stall": either(0.03, 0.3, is_there),
        "durable": either(0.3, 0.6, is_there),
        **changes,
    }


def make(costs: dict[str, Any], **more: Any) -> World:
    return World(**costs, **more)


SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


@SEEDS
@pytest.mark.parametrize("costs", [on_disk, on_cores], ids=["disk", "cores"])
def test_rises_within_two_and_is_back_while_the_neighbour_is_away(costs: Any, seed: int) -> None:
    world = make(costs(), seed=seed)
    run_until(world, COMES)
    quiet = interval(world)
    run_until(world, LEAVES)
    assert suffered(world, quiet) <= 3, "two that suffer, and the one that was under way"
    assert interval(world) > 2 * quiet
    run_until(world, ENDS)
    assert interval(world) < 1.6 * quiet, "twice and ten times as long beside the neighbour"


@SEEDS
def test_checkpoints_come_as_before_as_soon_as_the_disk_is_free(seed: int) -> None:
    """Not only the number: no checkpoint waits for an interval that no longer holds."""
    world = make(on_disk(), seed=seed)
    run_until(world, LEAVES + 4.0)  # what was under way when the neighbour left
    before = len(world.triggers)
    run_until(world, ENDS)
    assert len(world.triggers) - before > 0.6 * (ENDS - LEAVES - 4.0) / 0.46


@SEEDS
def test_slower_iterations_are_no_alarm(seed: int) -> None:
    """A second job on the GPU: nothing about checkpoints has changed."""
    world = make(on_gpu(), seed=seed)
    run_until(world, COMES)
    quiet = interval(world)
    run_until(world, ENDS + 30)
    assert max((seconds for at, seconds in world.intervals if at > COMES), default=quiet) < 1.3 * quiet
    assert interval(world) == pytest.approx(quiet, rel=0.35)


@SEEDS
@pytest.mark.parametrize("costs", [on_disk, on_gpu, on_cores], ids=["disk", "gpu", "cores"])
def test_each_phase_stays_within_the_bound(costs: Any, seed: int) -> None:
    """Beside what the first two take, before anything can be known."""
    world = make(costs(), seed=seed)
    phases = [(COMES, COMES), (LEAVES, LEAVES - COMES), (ENDS, ENDS - LEAVES)]
    for moment, seconds in phases:
        taken = run_until(world, moment)
        excess = 3 * world.stall(moment - 1) / seconds
        assert taken <= BOUND + 0.01 + excess, moment


@SEEDS
@pytest.mark.parametrize("costs", [on_disk, on_cores], ids=["disk", "cores"])
def test_every_time_it_comes_and_every_time_it_leaves(costs: Any, seed: int) -> None:
    world = make(costs(again_and_again), seed=seed)
    run_until(world, COMES)
    quiet = interval(world)
    for comes in range(30, 210, 30):
        run_until(world, comes + 15.0)
        assert suffered(world, quiet, since=comes) <= 3
        run_until(world, comes + 30.0)
        assert interval(world) < 1.6 * quiet, comes


@SEEDS
def test_what_only_looks_as_if_it_had_left_costs_no_more_than_the_bound(seed: int) -> None:
    """Iterations are quick again every few seconds, and checkpoints stay dear."""
    costs = on_cores(stall=lambda now: 0.15 if now >= COMES else 0.03)
    costs["iteration"] = Noise(lambda now: 0.04 if now >= COMES and now % 6 < 3 else 0.02, lambda now: 0.03)
    world = make(costs, seed=seed)
    run_until(world, COMES + 20)
    assert run_until(world, COMES + 200) <= BOUND + 0.005


def test_one_slow_write_decides_nothing() -> None:
    world = make({"iteration": lambda now, dice: 0.1, "durable": lambda now: 9.0 if 30 <= now < 31 else 0.5})
    run_until(world, 90)
    assert max(seconds for _, seconds in world.intervals) < 2
