"""What iterations and checkpoints cost, from what was seen lately. No run of its own: training is what is measured.

Owns:    which iterations are clean, what holds of the accounts so far, and when more clean iterations are needed.
Not:     the account of a stretch (account), what follows for the interval (auto).
Holds:   one odd value (a compilation, an evaluation, a pause) decides nothing, two in a row do. A model that becomes
         slower makes clean iterations slower, not checkpoints dearer: each checkpoint is compared with the clean
         iterations around it, and where those differ it is not judged at all.

A checkpoint costs the sum, over all iterations from its trigger to the end of its write, of what they took beyond a
clean one, the training thread's own waits included.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

from stepwell.training.policy.account import SIGMAS, Cost, Stretch, have_changed, without_pauses

_WARM: Final = 3
"""Iterations that never count: libraries load, kernels are chosen."""
_CLEAN: Final = 64
_BEFORE: Final = 12
_AFTER: Final = 4
"""Clean iterations around a checkpoint that it is compared with. So many have to follow, or the next one begins."""
_BUSY_CHECKPOINTS: Final = 4
"""After so many checkpoints without a clean iteration between them, the next one waits for some."""
_MOST: Final = 16
_LAST: Final = 5
_APART: Final = 0.25
_VOIDS: Final = 2
"""Accounts in a row that a change of the iterations may make void. Then one counts, whatever its error."""


class Profile:
    """Durations as they come in."""

    def __init__(self) -> None:
        self._seen = self._calm = self._voids = 0
        self._clean: deque[float] = deque(maxlen=_CLEAN)
        self._stretch: Stretch | None = None
        self._costs: deque[Cost] = deque(maxlen=_MOST)
        self._before: float | None = None
        """What a checkpoint took before the present time began, if that was less."""
        self._hint: float | None = None
        self._durables: deque[float] = deque(maxlen=_LAST)
        self._others: dict[int, tuple[float, float]] = {}
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
            self._calm = 0
            if self._stretch is None or self._stretch.after:
                self._settle()
                self._stretch = Stretch(list(self._clean)[-_BEFORE:])
            self._stretch.add(seconds, stall)
            return
        if self._seen <= _WARM:
            return
        self._clean.append(seconds)
        self._calm += 1
        if self._stretch is not None:
            self._stretch.after.append(seconds)
            if len(self._stretch.after) >= _AFTER:
                self._settle()
        elif self._calm % _AFTER == 0:
            self._look_for_change(list(self._clean)[-_BEFORE - _AFTER : -_AFTER], list(self._clean)[-_AFTER:])

    def note_checkpoint(self, seconds: float, *, is_odd: bool) -> None:
        """A checkpoint was committed, so long after its trigger. `is_odd`: it was not taken as automatic ones are."""
        if not is_odd:
            self._note_durable(seconds)
            self.news += 1
        if self._stretch is not None:
            self._stretch.is_odd |= is_odd
            self._stretch.rest = max(self._stretch.rest, self._rest(self._stretch, self._stretch.end_checkpoint()))

    def _note_durable(self, seconds: float) -> None:
        """Two in a row that are quicker by half than all before: the storage is free again."""
        self._durables.append(seconds)
        last = list(self._durables)[-2:]
        if max(last) < 0.5 * _second(list(self._durables)):
            self._durables = deque(last, maxlen=_LAST)

    def _rest(self, stretch: Stretch, iterations: int) -> int:
        """How many clean iterations have to follow a checkpoint that took part in so many."""
        if self._hint is not None or len(self._costs) < 2:
            return _AFTER  # it was taken to find out
        if self._is_dear(stretch.last()):
            return min(_AFTER, max(2, iterations))
        return min(_AFTER, max(1, iterations)) if stretch.checkpoints >= _BUSY_CHECKPOINTS else 0

    def _is_dear(self, cost: Cost | None) -> bool:
        usual = _mean(self._costs)
        return cost is not None and cost.seconds > usual + max(SIGMAS * cost.error, _APART * abs(usual))

    def _settle(self) -> None:
        """Close the account of the checkpoints of a stretch, unless iterations were of another time after it."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return
        hint = self._hint
        is_void = self._look_for_change(stretch.before, stretch.after)
        if is_void and self._voids < _VOIDS:
            self._voids += 1
            self._hint = self._hint if hint is None else hint  # it was to find out, and did not
            return
        self._voids = 0
        self._hint = None if stretch.checkpoints else hint
        if costs := stretch.settle():
            self._add(costs)

    def _look_for_change(self, earlier: list[float], recent: list[float]) -> bool:
        """Whether clean iterations are of another time. If they are quicker, what was before may hold again."""
        if not have_changed(earlier, recent):
            return False
        was, now = statistics.fmean(without_pauses(earlier)), statistics.median(recent)
        self._clean = deque((value for value in recent if abs(value - now) <= abs(value - was)), maxlen=_CLEAN)
        self._hint = self._before if now < was else None
        return True

    def _add(self, costs: list[Cost]) -> None:
        """Costs of one stretch, which count as one in a row: an error of its clean iterations is in all of them.

        Two in a row that differ from those before beyond their noise mean another time: what was before is gone.
        """
        last = costs[-1]
        is_cheap = bool(self._costs) and _differs([last], self._costs) < 0
        self._hint = max(0.0, last.seconds) + last.error if is_cheap else None  # the next one may come soon
        pair, before = [*list(self._costs)[-1:], last], list(self._costs)[:-1]
        self._costs.extend(costs)
        self.news += 1
        sign = _differs(pair, before) if before else 0
        if sign:
            known = _mean(before) if self._before is None else min(self._before, _mean(before))
            self._before = known if sign > 0 else None
            self._costs = deque(pair, maxlen=_MOST)

    @property
    def is_resting(self) -> bool:
        """Whether clean iterations are needed before the next checkpoint, to tell what the last ones took."""
        return self._stretch is not None and len(self._stretch.after) < self._stretch.rest

    @property
    def has_rhythm(self) -> bool:
        """Whether enough clean iterations were seen to compare with."""
        return len(self._clean) > _WARM

    @property
    def iteration(self) -> float | None:
        """Seconds of a clean iteration; None before there were some."""
        return statistics.fmean(without_pauses(self._clean)) if self._clean else None

    @property
    def checkpoint(self) -> float | None:
        """What a checkpoint takes from training, on the slowest rank; None before the first account is closed."""
        if not self._costs:
            return None
        error = math.sqrt(sum(item.error**2 for item in self._costs)) / len(self._costs)
        return self._slowest(_mean(self._costs) + (error if len(self._costs) < 4 else 0.0))

    @property
    def hint(self) -> float | None:
        """Something less than `checkpoint` that one may take by now: worth a checkpoint to find out."""
        return None if self._hint is None else self._slowest(self._hint)

    def _slowest(self, seconds: float) -> float:
        return max(0.0, seconds, *(cost for cost, _ in self._others.values()))

    @property
    def durable(self) -> float | None:
        """Seconds from trigger to commit: an upper value of the last ones; None before the first."""
        if not self._durables:
            return None
        return max(_second(self._durables), *(durable for _, durable in self._others.values()), 0.0)


def _second(values: Sequence[float]) -> float:
    """The second largest, where there are two."""
    return sorted(values)[max(0, len(values) - 2)]


def _mean(costs: Sequence[Cost]) -> float:
    """The mean, with the largest counted as the second largest: one odd value decides nothing."""
    ordered = sorted(item.seconds for item in costs)
    if len(ordered) > 2:
        ordered[-1] = ordered[-2]
    return statistics.fmean(ordered)


def _differs(last: list[Cost], before: Sequence[Cost]) -> int:
    """1 if all of the last are dearer than those before, beyond their noise; -1 if all are cheaper; else 0."""
    usual = _mean(before)
    apart = max(SIGMAS * max(item.error for item in last), _APART * abs(usual))
    if all(item.seconds > usual + apart for item in last):
        return 1
    return -1 if all(item.seconds < usual - apart for item in last) else 0
