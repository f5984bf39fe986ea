"""Threads that write, kept from one checkpoint to the next.

Owns:    starting them, once; their priority; handing work to some of them and collecting their errors.
Holds:   `run` returns when every thread is done with the work, whatever happened to the others; they do not take
         processor time from training that training could use, nor come first at the disk (I/O priority follows nice).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stepwell.storage.store.background import lower_priority


class _Call:
    """One thread's share of the work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done = threading.Event()
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
        finally:
            self.done.set()


class Pool:
    """Constructing only assigns; threads are started when they are needed first."""

    def __init__(self, name: str = "stepwell-write") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._started = 0

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call `work` on so many threads at once and wait. Raises the first error."""
        calls = [_Call(work) for _ in range(threads)]
        while self._started < threads:
            threading.Thread(target=self._serve, daemon=True, name=self._name).start()
            self._started += 1
        for call in calls:
            self._calls.put(call)
        for call in calls:
            call.done.wait()
        for call in calls:
            if call.error is not None:
                raise call.error

    def _serve(self) -> None:
        lower_priority()
        while True:
            self._calls.get()()
