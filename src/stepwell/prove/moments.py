"""When to kill, and whom. Pure: a seed and what the uninterrupted run showed give the plan.

Holds:   steps are distinct and ascending, so every kill lies beyond the one before it and the trial ends; with four
         kills or more at least two take the trainer alone and at least two take trainer and agent together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Victim = Literal["trainer", "trainer and agent"]
VICTIMS: tuple[Victim, Victim] = ("trainer", "trainer and agent")


@dataclass(frozen=True)
class Moment:
    """Kill `victim` once `step` is finished and `delay_seconds` have passed: somewhere inside the next iteration."""

    step: int
    victim: Victim
    delay_seconds: float


def choose_moments(
    count: int, *, first: int, last: int, iteration_seconds: float, generator: random.Random
) -> list[Moment]:
    """Up to `count` moments with steps drawn uniformly from [first, last]; fewer where there are fewer steps."""
    steps = range(first, max(first, last + 1))
    chosen = sorted(generator.sample(steps, min(count, len(steps))))
    victims = _victims(len(chosen), generator)
    return [
        Moment(step, victim, generator.random() * iteration_seconds)
        for step, victim in zip(chosen, victims, strict=True)
    ]


def _victims(count: int, generator: random.Random) -> list[Victim]:
    victims: list[Victim] = list(VICTIMS * min(2, count // 2))
    while len(victims) < count:
        victims.append(generator.choice(VICTIMS))
    generator.shuffle(victims)
    return victims
