"""Whether checkpoints come when they are due, whatever may prevent them.

Owns:    since when one is due and none was committed, the last reason for that, and the warning.
Not:     when one is due (pace), what prevents it (saving, outcome).
Holds:   warned after a few intervals, and again each time that has lasted twice as long; the first checkpoint after
         that is logged too. Used by several threads.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Final

from stepwell.events import journal
from stepwell.events.run_events import Event

_FEW: Final = 3.0
"""Intervals without a checkpoint that are worth a warning."""
_LEAST_SECONDS: Final = 10.0
_FIRST_SECONDS: Final = 60.0
"""As long as there was no checkpoint yet, nothing tells how long one takes."""
_MOST_INTERVAL_SECONDS: Final = 300.0
_LAST: Final = 5
_BEING_WRITTEN: Final = "the previous one is not durable yet"


@dataclass(frozen=True, kw_only=True)
class Overdue(Event):
    """A checkpoint is due for several intervals, and none was committed."""

    level: ClassVar[int] = logging.WARNING
    step: int
    since_step: int
    seconds: float
    reason: str

    def text(self) -> str:
        return (
            f"No checkpoint for {self.seconds:.0f} s: one has been due since step {self.since_step}, "
            f"training is at step {self.step}; {self.reason}"
        )


@dataclass(frozen=True, kw_only=True)
class OnTime(Event):
    """Checkpoints are committed again."""

    level: ClassVar[int] = logging.INFO
    step: int
    seconds: float

    def text(self) -> str:
        return f"Checkpoints work again (step {self.step}), after {self.seconds:.0f} s without one"


@dataclass(frozen=True)
class _Due:
    """Since when one is due: for the clock, for a person, and at which step."""

    at: float
    time: float
    step: int


class Watch:
    """Of one run."""

    def __init__(self, log: journal.EventLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._due: _Due | None = None
        self._before: float | None = None
        self._took: deque[float] = deque(maxlen=_LAST)
        self._warn_after, self._is_late = 0.0, False
        self._reason = ""

    def note_due(self, step: int) -> None:
        """The training thread wants a checkpoint of this step on disk."""
        now = time.monotonic()
        with self._lock:
            if self._due is None:
                self._begin(now, step)
                return
            seconds = now - self._due.at
            if seconds < self._warn_after:
                return
            self._warn_after, self._is_late = 2 * seconds, True
            event = Overdue(step=step, since_step=self._due.step, seconds=seconds, reason=self._reason)
        self._log.emit(event)

    def _begin(self, now: float, step: int) -> None:
        interval = 0.0 if self._before is None else min(_MOST_INTERVAL_SECONDS, now - self._before)
        self._due, self._before, self._reason = _Due(now, time.time(), step), now, _BEING_WRITTEN
        usual = statistics.median(self._took) if self._took else _FIRST_SECONDS / _FEW
        self._warn_after = max(_LEAST_SECONDS, _FEW * max(interval, usual))

    def note_reason(self, reason: str) -> None:
        """Why there is none: skipped, void, failed."""
        self._reason = reason

    @property
    def reason(self) -> str:
        """Why there is none, as far as is known."""
        return self._reason or _BEING_WRITTEN

    def note_committed(self, step: int) -> None:
        """There is one."""
        with self._lock:
            if self._due is None:
                return
            seconds, was_late = time.monotonic() - self._due.at, self._is_late
            self._due, self._is_late = None, False
            self._took.append(seconds)
        if was_late:
            self._log.emit(OnTime(step=step, seconds=seconds))

    @property
    def late(self) -> tuple[float, str] | None:
        """Since when (as `time.time()`) a checkpoint is due, and why there is none, once that is worth a warning."""
        with self._lock:
            return (self._due.time, self._reason) if self._due is not None and self._is_late else None
