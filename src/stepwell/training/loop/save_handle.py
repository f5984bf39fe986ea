"""What became of each snapshot: the futures behind save handles.

Owns:    one future per snapshot from its start until the agent let go of it.
Holds:   each is decided once. No lock is held while a future is completed, or while somebody is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from stepwell.errors import PersistError
from stepwell.events.run_events import logger
from stepwell.training.loop.completion import Completion, Explained, nothing

_REMEMBERED = 8
_WARN_SECONDS = 60.0


@dataclass(frozen=True)
class SaveHandle:
    """One save. `staging_completion`: the state may be changed; `upload_completion`: the checkpoint is committed."""

    step: int
    staging_completion: Future[None]
    upload_completion: Future[str]

    def wait(self, timeout: float | None = None) -> str:
        """Block until it is committed; returns the checkpoint's directory. Raises what went wrong."""
        return _result(self.upload_completion, timeout)


def has_failed(handle: SaveHandle, seconds: float) -> bool:
    """Whether it turns out within this time that it will not be committed. Blocks until that is decided."""
    try:
        return handle.upload_completion.exception(seconds) is not None
    except FutureTimeout:
        return False  # storage is slow: whoever waits for it says so


def _result(future: Future[str], timeout: float | None, waited: float = 0.0) -> str:
    while timeout is None:
        seconds = future.slice_seconds if isinstance(future, Explained) else _WARN_SECONDS
        try:
            return future.result(seconds)
        except FutureTimeout:
            if future.done():
                raise
            waited += seconds
            why = _why(future, waited) or "; see `events.jsonl` for the reason"
            logger.warning("waiting for a checkpoint for %.0f s%s", waited, why)
    try:
        return future.result(max(0.0, timeout - waited))
    except FutureTimeout:
        why = _why(future, timeout) or "; see `events.jsonl` for the reason"
        raise PersistError(f"a checkpoint is not durable after {timeout:.0f} s{why}") from None


def _why(future: Future[str], waited: float) -> str:
    told = future.explain(waited) if isinstance(future, Explained) else ""
    return told and f": {told}"


class Uploads:
    """Snapshots on their way to the disk. Used from the training, copier and listening threads.

    on_decided:   told the sequence of each, and whether it is committed
    before_wait:  called by whoever waits for one
    """

    def __init__(
        self,
        on_decided: Callable[[int, bool], None] = lambda sequence, is_durable: None,
        before_wait: Callable[[], None] = nothing,
    ) -> None:
        self._on_decided, self._before_wait = on_decided, before_wait
        self._futures: dict[int, Completion[str]] = {}
        self._decided: set[int] = set()
        self._lock = threading.Lock()
        self._over: PersistError | None = None

    def open(self, sequence: int) -> Completion[str]:
        """The future of a snapshot; the same one however often it is asked for."""
        future = self._open(sequence)
        if self._over is not None:
            self.fail(sequence, self._over)
        return future

    def _open(self, sequence: int) -> Completion[str]:
        with self._lock:
            if sequence not in self._futures:
                self._futures[sequence] = Completion(self._before_wait)
            return self._futures[sequence]

    def _decide(self, sequence: int, *, is_durable: bool) -> Completion[str] | None:
        """Its future; None if it was decided before."""
        future = self._open(sequence)
        with self._lock:
            if sequence in self._decided:
                return None
            self._decided.add(sequence)
        self._on_decided(sequence, is_durable)
        return future

    def succeed(self, sequence: int, directory: str) -> None:
        """It is committed."""
        if (future := self._decide(sequence, is_durable=True)) is not None:
            future.set_result(directory)

    def fail(self, sequence: int, error: PersistError) -> None:
        """It will not be committed."""
        if (future := self._decide(sequence, is_durable=False)) is not None:
            future.set_exception(error)

    def forget(self, sequence: int) -> None:
        """The agent has let go of it. One that was never committed is a failure."""
        self.fail(sequence, PersistError("dropped: a newer snapshot replaced it"))
        with self._lock:  # a fast agent may be here before the training thread asks for the future: the last few stay
            for number in sorted(self._decided)[:-_REMEMBERED]:
                self._decided.discard(number)
                self._futures.pop(number, None)

    def fail_all(self, error: PersistError) -> None:
        """Nothing will be committed any more, what is still to come included."""
        self._over = error
        for sequence in list(self._futures):
            self.open(sequence)

    def wait(self, timeout: float | None) -> None:
        """Block until all that are under way are decided. Raises PersistError if one of them fails."""
        started = time.monotonic()
        for future in self.pending():
            _result(future, timeout, time.monotonic() - started)

    def is_busy(self) -> bool:
        """Whether one is under way."""
        return bool(self.pending())

    def pending(self) -> list[Completion[str]]:
        """Those that are not decided."""
        with self._lock:
            return [future for future in self._futures.values() if not future.done()]
