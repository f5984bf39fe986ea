"""What checkpoints take from training: the iterations while they were under way, against the clean ones around them.

Owns:    one stretch of iterations, the account that closes it, and when two groups of iterations differ.
Not:     what follows from several accounts (profile).
Holds:   a few numbers for each checkpoint, however many iterations it lasts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SIGMAS: Final = 3.0
_PAUSE: Final = 10.0
"""An iteration so many times as long as the others, our own waits not counted, was the user's: an evaluation."""
_CHANGE: Final = 0.1
"""By which share clean iterations have to differ to be of another time."""

_MOST_PARTS: Final = 16
"""Checkpoints of a stretch that are remembered: with one always under way a stretch has no end."""


class Cost(NamedTuple):
    """What one checkpoint took from training, and how sure that is (one standard error)."""

    seconds: float
    error: float


@dataclass
class _Part:
    """Of a stretch: the iterations up to the commit of one checkpoint. `paused`: our waits in the user's pauses."""

    count: int = 0
    seconds: float = 0.0
    paused: float = 0.0

    def cost(self, clean: float, spread: float, known: int) -> Cost:
        """Against iterations of this mean and spread, of which so many are known."""
        error = spread * math.sqrt(self.count + self.count * self.count / known)
        return Cost(self.seconds - self.count * clean + self.paused, error)


@dataclass
class Stretch:
    """Iterations in a row during which checkpoints were under way, and the clean ones before and after."""

    before: list[float]
    after: list[float] = field(default_factory=list)
    rest: int = 0
    """So many clean iterations have to follow before the next checkpoint."""
    is_odd: bool = False
    """The user asked for one of the checkpoints: it waited for more than an automatic one does."""
    _parts: deque[_Part] = field(default_factory=lambda: deque(maxlen=_MOST_PARTS))
    _part: _Part = field(default_factory=_Part)

    def __post_init__(self) -> None:
        known = without_pauses(self.before)
        self._limit = _PAUSE * statistics.fmean(known) if known else math.inf

    @property
    def checkpoints(self) -> int:
        """How many were committed in it, of the last few."""
        return len(self._parts)

    def add(self, seconds: float, stall: float) -> None:
        """One more iteration; `stall` is what our own waits took of it."""
        if seconds - stall > self._limit:
            self._part.paused += stall
        else:
            self._part.count += 1
            self._part.seconds += seconds

    def end_checkpoint(self) -> int:
        """One was committed in the last iteration. Returns how many iterations it took part in."""
        self._parts.append(self._part)
        self._part = _Part()
        return self._parts[-1].count

    def last(self) -> Cost | None:
        """What the last one took, as far as the iterations before tell: they may have been of another time."""
        known = without_pauses(self.before)
        return self._parts[-1].cost(*_mean_and_spread(known)) if len(known) > 1 and self._parts else None

    def settle(self) -> list[Cost]:
        """What each checkpoint took; nothing if there is too little to compare with."""
        around = without_pauses(self.before + self.after)
        if self.is_odd or len(around) < 2:
            return []
        return [part.cost(*_mean_and_spread(around)) for part in self._parts]


def have_changed(earlier: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether these iterations are of another time: apart by more than their noise, and by more than a little."""
    one, two = without_pauses(earlier), without_pauses(recent)
    if len(one) < 3 or len(two) < 2:
        return False
    mean, other = statistics.fmean(one), statistics.fmean(two)
    squares = sum((value - mean) ** 2 for value in one) + sum((value - other) ** 2 for value in two)
    noise = math.sqrt(squares / (len(one) + len(two) - 2) * (1 / len(one) + 1 / len(two)))
    return abs(mean - other) > max(SIGMAS * noise, _CHANGE * min(mean, other))


def without_pauses(values: Sequence[float]) -> list[float]:
    """Without what was the user's: an evaluation, a compilation."""
    if not values:
        return []
    limit = _PAUSE * statistics.median(values)
    return [value for value in values if value <= limit]


def _mean_and_spread(values: list[float]) -> tuple[float, float, int]:
    return statistics.fmean(values), statistics.stdev(values), len(values)
