"""How much work to do between two checkpoints: the formula, and the reasons it gives.

Owns:    the interval as a function of what a checkpoint costs, how fast storage is, and how often runs fail.
Not:     where the numbers come from.
Holds:   the predicted overhead never exceeds the bound; a wish that cannot be met is said, with what can be.

    floor      C / p                  stay inside the bound
    floor      bytes / write rate     storage keeps up: the one before is durable
    target     sqrt(2 C (M + R))      least time lost to checkpoints and failures, once M is known (Young, Daly)

C is all that a checkpoint takes from training, from its trigger to its commit: not the time of the write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Term = Literal["overhead", "storage", "failures", "recovery point"]


@dataclass(frozen=True)
class Costs:
    """Seconds. `checkpoint` is what one takes from training, `durable` from its trigger to its commit."""

    checkpoint: float
    durable: float
    restart: float = 0.0
    mtbf: float | None = None


@dataclass(frozen=True)
class Interval:
    """Seconds of work between checkpoints, the term that decided, and what it means."""

    seconds: float
    term: Term
    overhead: float
    """Predicted, relative to the run without checkpoints."""
    at_risk: float
    """The most work that a failure can cost: one interval, and the time in which the next one becomes durable."""
    least: float
    """What is left of `seconds` where storage turns out quicker: it keeps up if the one before is durable."""
    problem: str = ""
    """Why a request of the user is not met, and what is possible."""


def choose(costs: Costs, *, overhead: float, recovery_point: float | None = None) -> Interval:
    """The interval for these costs. `overhead` is a share (0.035), `recovery_point` the most work that may be lost."""
    floors: dict[Term, float] = {"overhead": costs.checkpoint / overhead, "storage": costs.durable}
    floor = max(floors.values())
    terms = dict(floors)
    if costs.mtbf is not None:
        terms["failures"] = math.sqrt(2 * costs.checkpoint * (costs.mtbf + costs.restart))
    term = max(terms, key=lambda name: terms[name])
    seconds, problem = terms[term], ""
    if recovery_point is not None and seconds + costs.durable > recovery_point:
        term, seconds = "recovery point", max(floor, recovery_point - costs.durable)
        if floor + costs.durable > recovery_point:
            term = max(floors, key=lambda name: floors[name])
            problem = (
                f"cannot limit lost work to {recovery_point:.3g} s, because {_WHY[term]}; the least is "
                f"{floor + costs.durable:.3g} s"
            )
    least = max(terms["overhead"], terms.get("failures", 0.0))
    if recovery_point is not None and least + costs.durable > recovery_point:
        least = max(terms["overhead"], recovery_point - costs.durable)
    share = costs.checkpoint / seconds if seconds else 0.0
    return Interval(seconds, term, share, seconds + costs.durable, least, problem)


_WHY: dict[Term, str] = {
    "overhead": "saving that often would exceed the allowed overhead",
    "storage": "storage needs longer than that for each save",
}
