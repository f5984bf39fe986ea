"""What became of each snapshot: the futures behind save handles.

Owns:    one future per snapshot from its start until the agent let go of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from stepwell.errors import PersistError

_REMEMBERED = 8


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


def _result(future: Future[str], timeout: float | None) -> str:
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise PersistError(f"a checkpoint is not durable after {timeout:.0f} s; `events.jsonl` tells why") from None


class Uploads:
    """Snapshots on their way to the disk. Used from the training, copier and listening threads.

    `on_decided` is told the sequence of each, and whether it is committed.
    """

    def __init__(self, on_decided: Callable[[int, bool], None] = lambda sequence, is_durable: None) -> None:
        self._on_decided = on_decided
        self._futures: dict[int, Future[str]] = {}
        self._lock = threading.Lock()
        self._over: PersistError | None = None

    def open(self, sequence: int) -> Future[str]:
        """The future of a snapshot; the same one however often it is asked for."""
        with self._lock:
            future = self._futures.setdefault(sequence, Future())
            if self._over is not None and not future.done():
                self._on_decided(sequence, False)
                future.set_exception(self._over)
            return future

    def succeed(self, sequence: int, directory: str) -> None:
        """It is committed."""
        future = self.open(sequence)
        with self._lock:
            if not future.done():
                self._on_decided(sequence, True)
                future.set_result(directory)

    def fail(self, sequence: int, error: PersistError) -> None:
        """It will not be committed."""
        future = self.open(sequence)
        with self._lock:
            if not future.done():
                self._on_decided(sequence, False)
                future.set_exception(error)

    def forget(self, sequence: int) -> None:
        """The agent has let go of it. One that was never committed is a failure."""
        self.fail(sequence, PersistError("given up: a newer snapshot took its place"))
        with self._lock:  # a fast agent may be here before the training thread asks for the future: the last few stay
            decided = sorted(number for number, future in self._futures.items() if future.done())
            for number in decided[:-_REMEMBERED]:
                del self._futures[number]

    def fail_all(self, error: PersistError) -> None:
        """Nothing will be committed any more, what is still to come included."""
        self._over = error
        for sequence in list(self._futures):
            self.open(sequence)

    def wait(self, timeout: float | None) -> None:
        """Block until all that are under way are decided. Raises PersistError if one of them fails."""
        for future in self.pending():
            _result(future, timeout)

    def is_busy(self) -> bool:
        """Whether one is under way."""
        return bool(self.pending())

    def pending(self) -> list[Future[str]]:
        """Those that are not decided."""
        with self._lock:
            return [future for future in self._futures.values() if not future.done()]
