"""The interval: inside the bound for any costs, told when a wish cannot be met, and close to the best there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.training.policy.interval import Costs, choose
from tests.training.policy.simulator import goodput

seconds = st.floats(1e-6, 1e6)


@given(seconds, seconds, seconds, st.none() | seconds, st.floats(1e-4, 1.0), st.none() | seconds)
def test_the_predicted_overhead_is_within_the_bound(
    checkpoint: float, durable: float, restart: float, mtbf: float | None, bound: float, recovery: float | None
) -> None:
    found = choose(Costs(checkpoint, durable, restart, mtbf), overhead=bound, recovery_point=recovery)
    assert found.overhead <= bound * (1 + 1e-12)
    assert found.seconds >= durable * (1 - 1e-12), "storage would fall behind"
    assert found.at_risk == pytest.approx(found.seconds + durable)
    if recovery is not None and not found.problem:
        assert found.at_risk <= recovery * (1 + 1e-12)


@pytest.mark.parametrize(
    ("costs", "term", "expected"),
    [
        (Costs(checkpoint=1, durable=1), "overhead", 20),
        (Costs(checkpoint=0.01, durable=4), "storage", 4),
        (Costs(checkpoint=0.2, durable=4, restart=60, mtbf=3600), "failures", math.sqrt(0.4 * 3660)),
        (Costs(checkpoint=10, durable=4, restart=60, mtbf=100), "overhead", 200),
        (Costs(checkpoint=0.0, durable=0.0), "overhead", 0),
    ],
)
def test_the_term_that_decides(costs: Costs, term: str, expected: float) -> None:
    found = choose(costs, overhead=0.05)
    assert (found.term, found.problem) == (term, "")
    assert found.seconds == pytest.approx(expected)


def test_a_recovery_point_shortens_the_interval_down_to_the_floor() -> None:
    costs = Costs(checkpoint=0.2, durable=4, restart=60, mtbf=36_000)
    assert choose(costs, overhead=0.05).term == "failures"
    found = choose(costs, overhead=0.05, recovery_point=60)
    assert (found.term, found.seconds, found.at_risk, found.problem) == ("recovery point", 56, 60, "")
    assert choose(costs, overhead=0.05, recovery_point=1e6) == choose(costs, overhead=0.05)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (Costs(checkpoint=1, durable=1), "exceed the allowed overhead; the least is 21 s"),
        (Costs(0.01, 9), "longer than that for each save; the least is 18 s"),
    ],
)
def test_a_recovery_point_that_cannot_be_met_is_said_with_what_can(costs: Costs, said: str) -> None:
    found = choose(costs, overhead=0.05, recovery_point=5)
    assert said in found.problem
    assert found.at_risk > 5


EXPONENTIAL = ("exponential", lambda mean: lambda dice: dice.expovariate(1 / mean))
WEIBULL = (
    "weibull",  # most failures soon after a start, as clusters have them
    lambda mean: lambda dice: dice.weibullvariate(mean / math.gamma(1 + 1 / 0.7), 0.7),
)


@pytest.mark.parametrize("kind", [EXPONENTIAL, WEIBULL], ids=lambda kind: kind[0])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(checkpoint=0.2, durable=4, restart=60, mtbf=3600),
        Costs(checkpoint=0.005, durable=3.3, restart=20, mtbf=14_400),
        Costs(checkpoint=5, durable=40, restart=300, mtbf=86_400),
        Costs(checkpoint=1, durable=10, restart=30, mtbf=1800),
    ],
    ids=["hour", "gpu", "day", "spot"],
)
def test_goodput_is_close_to_the_best_interval_of_all(kind: tuple[str, object], costs: Costs) -> None:
    """Found by trying them all, on the same failures."""
    assert costs.mtbf is not None
    failures = kind[1](costs.mtbf)  # type: ignore[operator]
    chosen = choose(costs, overhead=0.035).seconds
    tried = [costs.durable * 1.1**power for power in range(120)]
    best = max(goodput(value, costs, failures, lives=4000, seed=1) for value in tried)
    assert best - goodput(chosen, costs, failures, lives=4000, seed=1) < 0.005


def test_control_spending_the_whole_bound_is_not() -> None:
    """What a policy that knows no failures does: eight times as often as needed here."""
    costs = Costs(checkpoint=0.2, durable=4, restart=60, mtbf=3600)
    failures = EXPONENTIAL[1](3600.0)
    chosen, spent = (
        goodput(value, costs, failures, lives=4000, seed=1) for value in (choose(costs, overhead=0.05).seconds, 4.0)
    )
    assert chosen - spent > 0.02


def test_the_simulator_agrees_with_theory() -> None:
    """Waste = C / (t + C) + (t / 2 + L + R) / M, to first order."""
    costs = Costs(checkpoint=0.2, durable=4, restart=60, mtbf=36_000)
    found = goodput(100, costs, lambda dice: dice.expovariate(1 / 36_000), lives=20_000, seed=3)
    waste = 0.2 / 100.2 + (50 + 4 + 60) / 36_000
    assert found == pytest.approx(1 - waste, abs=0.002)
