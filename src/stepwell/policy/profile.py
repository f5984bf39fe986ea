"""What iterations and checkpoints cost, from what was seen lately. No run of its own: training is what is measured.

Owns:    which iterations are clean, and what a checkpoint took from those that are not.
Holds:   one odd value (a compilation, an evaluation, a pause) decides nothing, two in a row do. A model that becomes
         slower makes clean iterations slower, not checkpoints dearer: each checkpoint is compared with the clean
         iterations around it.

A checkpoint costs the sum, over all iterations from its trigger to the end of its write, of what they took beyond a
clean one, the training thread's own waits included.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

_WARM: Final = 3
"""Iterations that never count: libraries load, kernels are chosen."""
_CLEAN: Final = 64
_BEFORE: Final = 12
_AFTER: Final = 4
"""Clean iterations around a checkpoint that it is compared with. So many have to follow, or the next one begins."""
_PAUSE: Final = 10.0
"""An iteration so many times as long as the others, our own waits not counted, was the user's: an evaluation."""
_MOST: Final = 16
_LAST: Final = 5
_SIGMAS: Final = 3.0


class Cost(NamedTuple):
    """What one checkpoint took from training, and how sure that is (one standard error)."""

    seconds: float
    error: float


@dataclass
class _Stretch:
    """Iterations in a row during which a checkpoint was under way."""

    before: list[float]
    busy: list[tuple[float, float]]
    after: list[float]
    checkpoints: int = 0
    is_odd: bool = False
    """The user asked for one of them: it waited for more than an automatic one does."""


class Profile:
    """Durations as they come in."""

    def __init__(self) -> None:
        self._seen = 0
        self._clean: deque[float] = deque(maxlen=_CLEAN)
        self._stretch: _Stretch | None = None
        self._costs: deque[Cost] = deque(maxlen=_MOST)
        self._durables: deque[float] = deque(maxlen=_LAST)
        self._others: dict[int, tuple[float, float]] = {}
        self.since_clean = 0
        """Checkpoints since the last clean iteration."""
        self.news = 0
        """How often costs changed."""

    def remember(self, *, checkpoint: float, durable: float) -> None:
        """Start from what an earlier process of the run measured."""
        self.news += 1
        self._costs.append(Cost(checkpoint, 0.0))
        self._durables.append(durable)

    def note_others(self, rank: int, checkpoint: float, durable: float) -> None:
        """What checkpoints cost another rank."""
        self._others[rank] = (checkpoint, durable)
        self.news += 1

    def note_iteration(self, seconds: float, *, stall: float, is_busy: bool) -> None:
        """An iteration is over; `stall` is what our own waits in the training thread took of it."""
        self._seen += 1
        if is_busy:
            if self._stretch is None or self._stretch.after:
                self._settle()
                self._stretch = _Stretch(list(self._clean)[-_BEFORE:], [], [])
            self._stretch.busy.append((seconds, stall))
            return
        if self._seen <= _WARM:
            return
        self.since_clean = 0
        self._clean.append(seconds)
        if self._stretch is not None:
            self._stretch.after.append(seconds)
            if len(self._stretch.after) >= _AFTER:
                self._settle()

    def note_checkpoint(self, seconds: float, *, is_odd: bool) -> None:
        """A checkpoint was committed, so long after its trigger. `is_odd`: it was not taken as automatic ones are."""
        self.since_clean += 1
        if not is_odd:
            self._durables.append(seconds)
            self.news += 1
        if self._stretch is not None:
            self._stretch.checkpoints += 1
            self._stretch.is_odd |= is_odd

    def _settle(self) -> None:
        """Close the account of the checkpoints of a stretch."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or not stretch.checkpoints or stretch.is_odd:
            return
        around = _without_pauses(stretch.before + stretch.after)
        if len(around) < 2:
            return
        clean, spread = statistics.fmean(around), statistics.stdev(around)
        spent = 0.0
        for seconds, stall in stretch.busy:
            is_pause = seconds - stall > _PAUSE * clean
            spent += stall if is_pause else seconds - clean
        count = len(stretch.busy)
        error = spread * math.sqrt(count + count * count / len(around))
        self._add(Cost(spent / stretch.checkpoints, error / stretch.checkpoints))

    def _add(self, cost: Cost) -> None:
        """Two in a row that differ from those before beyond their noise mean another time: what was before is gone."""
        self._costs.append(cost)
        self.news += 1
        before, last = list(self._costs)[:-2], list(self._costs)[-2:]
        if not before:
            return
        usual = _mean(before)
        noise = _SIGMAS * max(item.error for item in last)
        apart = max(noise, 0.25 * abs(usual))
        if all(item.seconds > usual + apart for item in last) or all(item.seconds < usual - apart for item in last):
            self._costs = deque(last, maxlen=_MOST)

    @property
    def has_rhythm(self) -> bool:
        """Whether enough clean iterations were seen to compare with."""
        return len(self._clean) > _WARM

    @property
    def iteration(self) -> float | None:
        """Seconds of a clean iteration; None before there were some."""
        return statistics.fmean(_without_pauses(list(self._clean))) if self._clean else None

    @property
    def checkpoint(self) -> float | None:
        """What a checkpoint takes from training, on the slowest rank; None before the first account is closed."""
        if not self._costs:
            return None
        costs = list(self._costs)
        error = math.sqrt(sum(item.error**2 for item in costs)) / len(costs)
        return max(0.0, _mean(costs) + error, *(cost for cost, _ in self._others.values()))

    @property
    def durable(self) -> float | None:
        """Seconds from trigger to commit: an upper value of the last ones; None before the first."""
        if not self._durables:
            return None
        ordered = sorted(self._durables)
        return max(ordered[max(0, len(ordered) - 2)], *(durable for _, durable in self._others.values()), 0.0)


def _mean(costs: list[Cost]) -> float:
    """The mean, with the largest counted as the second largest: one odd value decides nothing."""
    ordered = sorted(item.seconds for item in costs)
    if len(ordered) > 2:
        ordered[-1] = ordered[-2]
    return statistics.fmean(ordered)


def _without_pauses(values: list[float]) -> list[float]:
    if not values:
        return []
    limit = _PAUSE * statistics.median(values)
    return [value for value in values if value <= limit]
