"""When to kill, and whom. Pure: a seed and what the uninterrupted run showed give the plan.

Holds:   steps are distinct and ascending, so every kill lies beyond the one before it and the trial ends; each kind of
         victim comes twice if there are kills enough for that, and at least one kill makes the run begin again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

Victim = Literal["trainer", "trainer and agent", "rank", "everything", "agent"]
VICTIMS: Final[tuple[Victim, ...]] = ("trainer", "trainer and agent")
"""Of one process."""
MANY: Final[tuple[Victim, ...]] = ("rank", "everything", "agent")
"""Of many: one rank, which the others and the launcher have to notice; all ranks and agents with their launcher; one
agent, without which training goes on.
"""


@dataclass(frozen=True)
class KillMoment:
    """Kill `victim` once `step` is finished and `delay_seconds` have passed: somewhere inside the next iteration."""

    step: int
    victim: Victim
    delay_seconds: float
    rank: int = 0

    @property
    def ends_the_attempt(self) -> bool:
        """Without an agent training goes on."""
        return self.victim != "agent"

    @property
    def label(self) -> str:
        """Whom, for a person."""
        return {"rank": f"rank {self.rank}", "agent": f"agent of rank {self.rank}"}.get(self.victim, self.victim)


def choose_moments(
    count: int, *, first: int, last: int, iteration_seconds: float, generator: random.Random, world_size: int = 1
) -> list[KillMoment]:
    """Up to `count` moments with steps drawn uniformly from [first, last]; fewer where there are fewer steps."""
    steps = range(first, max(first, last + 1))
    chosen = sorted(generator.sample(steps, min(count, len(steps))))
    victims = _victims(len(chosen), VICTIMS if world_size == 1 else MANY, generator)
    return [
        KillMoment(step, victim, generator.random() * iteration_seconds, _rank(victim, world_size, generator))
        for step, victim in zip(chosen, victims, strict=True)
    ]


def _rank(victim: Victim, world_size: int, generator: random.Random) -> int:
    return generator.randrange(world_size) if victim in ("rank", "agent") else 0


def _victims(count: int, kinds: tuple[Victim, ...], generator: random.Random) -> list[Victim]:
    victims: list[Victim] = list(kinds * min(2, count // len(kinds)))
    while len(victims) < count:
        victims.append(generator.choice(kinds if victims else kinds[:2]))
    generator.shuffle(victims)
    return victims
