"""Lets the shared place know how far the nodes are, so that a start that cannot reach them does not begin further back.

Owns:    the thread that writes `nodes.json`; of rank 0's agent only.
Holds:   at most one write in a few seconds, however often a checkpoint is whole. A shared place that fails or hangs
         holds up this thread and nothing else; it tries again until it works.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from stepwell.errors import FencedError, StepwellError
from stepwell.events.journal import EventLog
from stepwell.events.level_events import MarkFailed
from stepwell.storage.store.background import retry_seconds
from stepwell.storage.store.commit import check_fence
from stepwell.storage.store.nodes_mark import Mark, leave_mark, remove_unfinished
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_LEAST_SECONDS: Final = 5.0
"""From one write to the next: so far the mark may be behind, if agent and trainer die at once."""
_HANGS_SECONDS: Final = 10.0


class Marker:
    """Constructing only assigns. `cache`: the directory that all nodes gave; empty if they gave different ones."""

    def __init__(self, paths: RunPaths, run: str, cache: str, log: EventLog) -> None:
        self._paths, self._run, self._cache, self._log = paths, run, cache, log
        self._changed = threading.Condition()
        self._newest: CheckpointId | None = None
        self._written: CheckpointId | None = None
        self._written_at = self._began_at = 0.0
        self._is_hurried = self._is_closed = self._is_failing = False

    def start(self) -> None:
        """Begin to work."""
        threading.Thread(target=self._work, daemon=True, name="stepwell-mark").start()

    def note(self, id: CheckpointId) -> None:
        """This one is whole on the nodes. Any thread; never waits."""
        with self._changed:
            if self._newest is None or id > self._newest:
                self._newest = id
                self._changed.notify_all()

    def hurry(self) -> None:
        """The run ends: what is noted is to be written now."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be written, or writing does not get on."""
        hangs = self._began_at and time.monotonic() - self._began_at > _HANGS_SECONDS
        return self._is_closed or self._newest == self._written or self._is_failing or bool(hangs)

    def close(self) -> None:
        """No more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        failures = 0
        while (id := self._next()) is not None:
            self._began_at = time.monotonic()
            try:
                check_fence(self._paths, id)
                if self._written is None:
                    remove_unfinished(self._paths)
                leave_mark(self._paths, Mark(self._run, id, self._cache))
            except FencedError:
                return self.close()  # whoever continues the run knows better
            except (OSError, StepwellError) as error:
                if not failures:
                    self._log.emit(MarkFailed(step=id.step, error=str(error)))
                self._is_failing = True
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, retry_seconds(failures))
                failures += 1
            else:
                failures, self._is_failing = 0, False
                self._written, self._written_at = id, time.monotonic()
            self._began_at = 0.0
        return None

    def _next(self) -> CheckpointId | None:
        """Wait until there is something to write, and its time has come. None: no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._newest != self._written)
            left = self._written_at + _LEAST_SECONDS - time.monotonic() if self._written is not None else 0.0
            self._changed.wait_for(lambda: self._is_closed or self._is_hurried, max(0.0, left))
            return None if self._is_closed else self._newest
