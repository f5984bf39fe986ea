"""Runs that fail, on paper: how much of the time is work that counts."""

from __future__ import annotations

import random
from collections.abc import Callable

from stepwell.training.policy.interval import Costs

Failures = Callable[[random.Random], float]
"""Draws the seconds to the next failure."""


def goodput(seconds: float, costs: Costs, failures: Failures, *, lives: int, seed: int) -> float:
    """Share of the time that went into work that was kept, over so many failures.

    A checkpoint is taken after `seconds` of work and takes `costs.checkpoint` from training; it counts when
    `costs.durable` have passed since. A failure throws away what came after the last one that counts.
    """
    dice = random.Random(seed)
    kept = passed = 0.0
    period = seconds + costs.checkpoint
    for _ in range(lives):
        life = failures(dice)
        whole = int(life // period)  # triggers at k * period - cost, for k = 1, 2, ...
        while whole and whole * period - costs.checkpoint + costs.durable > life:
            whole -= 1
        kept += whole * seconds
        passed += life + costs.restart
    return kept / passed
