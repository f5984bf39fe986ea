"""The futures that users get.

Holds:   nobody can cancel one; callbacks run in a thread of their own, so that one that takes long, or asks the
         Checkpointer, holds up nothing but other callbacks, and the end of the run for as long as that may take.
         Whoever waits for one in the training thread first lets the snapshot under way be judged: that needs this
         thread, and it is about to stop.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from stepwell.events.run_events import logger

T = TypeVar("T")


def nothing() -> None:
    """Before a wait for a snapshot that is over."""


class Explained(Future[T]):
    """One that can say what it waits for. `explain` is told for how many seconds somebody has waited; "": nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.explain: Callable[[float], str] = lambda waited: ""
        self.slice_seconds = 60.0
        """How often whoever waits logs it."""


class Completion(Explained[T]):
    """Of one stage of one save. `before_wait` must not raise."""

    def __init__(self, before_wait: Callable[[], None] = nothing) -> None:
        super().__init__()
        self.before_wait = before_wait
        self.set_running_or_notify_cancel()  # asyncio cancels what it stops waiting for; the save goes on

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        self._prepare()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        self._prepare()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """As of any future; the training thread may sleep in an event loop until it is called."""
        self._prepare()
        super().add_done_callback(lambda future: _callbacks.post(lambda: fn(future)))

    def _prepare(self) -> None:
        if not self.done():
            self.before_wait()


class _Callbacks:
    """A thread that is there while callbacks are."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: the thread, and what it was to call, are its parent's. The lock may have been held."""
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], Any]] = deque()
        self._thread: threading.Thread | None = None

    def post(self, call: Callable[[], Any]) -> None:
        """Run it soon, after those that were posted before."""
        with self._changed:
            self._calls.append(call)
            if self._thread is None:
                thread = threading.Thread(target=self._run, daemon=True, name="stepwell-callbacks")
                thread.start()  # it waits for the lock
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # as `concurrent.futures` does
                logger.exception("a callback of a save raised an error")

    def finish(self, seconds: float) -> bool:
        """Block until none is left. False: one takes longer."""
        if threading.current_thread() is self._thread:
            return True  # the run is ended by a callback
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)


_callbacks: Final = _Callbacks()
os.register_at_fork(after_in_child=_callbacks.forget)


def finish_callbacks(seconds: float) -> None:
    """The process may end after this: what was posted has run by then. Warns of what takes longer."""
    if not _callbacks.finish(seconds):
        logger.warning("a callback of a save still runs after %.0f s; it is aborted when this process ends", seconds)
