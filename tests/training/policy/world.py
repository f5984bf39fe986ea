"""A training run on paper: iterations and checkpoints with the costs a test gives them, under a policy that decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell.training.policy.auto import Auto, Tempo
from stepwell.training.policy.every import Moment
from stepwell.training.policy.profile import Profile


@dataclass
class World:
    """Seconds. Each may be a function of the time that has passed."""

    iteration: Callable[[float, random.Random], float]
    stall: Callable[[float], float] = lambda now: 0.0
    durable: Callable[[float], float] = lambda now: 1.0
    slowed: Callable[[float], float] = lambda now: 0.0
    """By which share iterations are longer while a checkpoint is written."""
    wishes: Auto = field(default_factory=Auto)
    mtbf: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.profile = Profile()
        self.tempo = Tempo(self.wishes, self.profile)
        self.now = self.clean = 0.0
        self.triggers: list[float] = []
        self.intervals: list[tuple[float, float]] = []
        self._ends: list[tuple[float, float]] = []
        self._stall = 0.0

    @property
    def overhead(self) -> float:
        """What checkpoints took, beside what the iterations take without them."""
        return self.now / self.clean - 1

    def run(self, iterations: int) -> World:
        for number in range(iterations):
            self._iterate(number)
        return self

    def _iterate(self, number: int) -> None:
        started, stall = self.now, self._stall
        clean = self.iteration(self.now, self.dice)
        self.clean += clean
        is_busy = bool(self._ends)
        self.now += stall + clean * (1 + (self.slowed(self.now) if is_busy else 0.0))
        self._stall = 0.0
        ended = [(end, begun) for end, begun in self._ends if end <= self.now]
        self._ends = [pair for pair in self._ends if pair not in ended]
        self.profile.note_iteration(self.now - started, stall=stall, is_busy=is_busy)
        for end, begun in ended:
            self.profile.note_checkpoint(end - begun, is_odd=False)
        found = self.tempo.decide(mtbf=self.mtbf, restart=0.0)
        if found is not None:
            self.intervals.append((self.now, found.seconds))
        since = self.now - (self.triggers[-1] if self.triggers else 0.0)
        moment = Moment(number, number, since, 0, False, self.tempo.interval(is_writing=bool(self._ends)))
        if len(self._ends) < 2 and self.wishes.is_due(moment):
            self.triggers.append(self.now)
            self.tempo.begin()
            self._stall = self.stall(self.now)
            before = max([end for end, _ in self._ends], default=self.now)
            self._ends.append((before + self.durable(self.now), self.now))
