"""Whether a checkpoint is due, and whether the job is to stop: SCR's rules, decided by rank 0 for all.

Owns:    counting calls, time and cost.
Holds:   a signal to any rank stops all of them, as a halt does, with one more checkpoint. The cost of an output counts
         until `complete_output` returns, the way to the prefix included where the program waits for it (SCR stops its
         clock before that).
"""

from __future__ import annotations

import time
from dataclasses import replace

from stepwell.adapters.scr.job import ScrJob
from stepwell.adapters.scr.prefix_index import TOLD, now
from stepwell.events.run_events import logger
from stepwell.events.scr_events import NoInterval
from stepwell.ranks.groups.consent import lead


class Need:
    """Of one rank. `need` and `should_exit` are collective."""

    def __init__(self, job: ScrJob) -> None:
        self._job = job
        self._calls = 0
        self._last_end = time.monotonic()
        self._cost_seconds, self._count = 0.0, 0
        self._is_told = self._has_said_so = False

    def note(self, began: float) -> None:
        """A checkpoint is complete, which began then."""
        self._last_end = time.monotonic()
        self._cost_seconds += self._last_end - began
        self._count += 1

    def need(self) -> bool:
        """Whether to checkpoint now."""
        self._calls += 1
        self._pass_on()

        def decide() -> bool:
            is_stopping = self._why_stop() is not None
            self._has_said_so = self._has_said_so or is_stopping
            return is_stopping or self._is_due()

        return bool(lead(self._job.group, "need_checkpoint", decide))

    def _is_due(self) -> bool:
        settings, since = self._job.settings, time.monotonic() - self._last_end
        if not (settings.interval or settings.seconds or settings.overhead):
            if self._calls == 1:
                self._job.log.emit(NoInterval())
            return True
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
        """Whether to leave the loop. After a signal not before need_checkpoint() said yes, if the program asks that."""
        self._pass_on()

        def decide() -> bool:
            why = self._why_stop()
            is_asked_first = why is not None and why.startswith(TOLD) and self._calls > 0
            return why is not None and (self._has_said_so or not is_asked_first)

        return bool(lead(self._job.group, "should_exit", decide))

    def _why_stop(self) -> str | None:
        settings, order = self._job.settings, self._job.leave.order
        if order is not None:
            return f"{TOLD}: {order.by}"
        return self._job.prefix.halt().why(now(), end_time=settings.end_time, halt_seconds=settings.halt_seconds)

    def _pass_on(self) -> None:
        """Any rank may be told to leave; rank 0, which decides for all, reads it in the halt file. Local."""
        job, order = self._job, self._job.leave.order
        if order is None or self._is_told or job.group.is_leader:
            return
        self._is_told = True
        reason = f"{TOLD}: {order.by} on rank {job.group.rank}"
        try:
            job.prefix.change_halt(lambda halt: halt if halt.reason else replace(halt, reason=reason))
        except OSError as error:
            logger.warning("%s, but the other ranks cannot be notified: %s", reason, error)
