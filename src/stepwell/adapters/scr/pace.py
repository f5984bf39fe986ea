"""Whether a checkpoint is due, and whether the job is to stop: SCR's rules, decided by rank 0 for all.

Owns:    counting calls, time and cost.
Holds:   the cost of an output counts until `complete_output` returns, the way to the prefix included where the program
         waits for it (SCR stops its clock before that).
"""

from __future__ import annotations

import time

from stepwell.adapters.scr.index import now
from stepwell.adapters.scr.job import Job
from stepwell.groups.consent import lead


class Pace:
    """Of one rank. `need` and `should_exit` are collective."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._calls = 0
        self._last_end = time.monotonic()
        self._cost_seconds, self._count = 0.0, 0

    def note(self, began: float) -> None:
        """A checkpoint is complete, which began then."""
        self._last_end = time.monotonic()
        self._cost_seconds += self._last_end - began
        self._count += 1

    def need(self) -> bool:
        """Whether to checkpoint now."""
        self._calls += 1
        return bool(lead(self._job.group, "need_checkpoint", lambda: self._why_stop() is not None or self._is_due()))

    def _is_due(self) -> bool:
        settings, since = self._job.settings, time.monotonic() - self._last_end
        if not (settings.interval or settings.seconds or settings.overhead):
            return True  # nothing to go by
        if settings.interval and self._calls % settings.interval == 0:
            return True
        if settings.seconds and since >= settings.seconds:
            return True
        if not settings.overhead:
            return False
        if not self._count:
            return True  # to learn the cost
        cost = self._cost_seconds / self._count
        return cost / (since + cost) * 100.0 < settings.overhead

    def should_exit(self) -> bool:
        """Whether to leave the loop."""
        return bool(lead(self._job.group, "should_exit", lambda: self._why_stop() is not None))

    def _why_stop(self) -> str | None:
        settings = self._job.settings
        return self._job.prefix.halt().why(now(), end_time=settings.end_time, halt_seconds=settings.halt_seconds)
