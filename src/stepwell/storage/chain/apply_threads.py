"""The threads that bring a chain back: as many as there are cores, since a process that restores does nothing else.

Holds:   who asks for one thread gets none: the work is done where it is asked for. Nothing is left running: leaving a
         crew waits for what has begun and drops what has not.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST_THREADS: Final = 16
"""They let go of the interpreter's lock for a tenth of a millisecond at a time: more of them would wait for it."""


def all_threads() -> int:
    """As many as are worth it here."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class Crew:
    """So many threads. Constructing starts none."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "stepwell-chain") if threads > 1 else None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def submit(self, work: Callable[..., Answer], *given: object) -> Future[Answer]:
        """Done as soon as a thread is free, in the order of asking; without threads at once."""
        if self._pool is not None:
            return self._pool.submit(work, *given)
        done: Future[Answer] = Future()
        done.set_result(work(*given))
        return done

    def each(self, work: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        """Answers in the order of the items."""
        return map(work, items) if self._pool is None else self._pool.map(work, items)


class Ahead(Generic[Item]):
    """Items that a thread makes before they are asked for, at most so many bytes of them; one is always made. What it
    raises is raised where the item would have been.
    """

    def __init__(self, items: Generator[Item], nbytes: Callable[[Item], int], most_nbytes: int) -> None:
        self._items, self._nbytes, self._most = items, nbytes, most_nbytes
        self._made: deque[Item] = deque()
        self._held, self._is_closed = 0, False
        self._change = threading.Condition()
        self._work = Crew(2)
        self._end: Future[None] | None = None

    def __enter__(self) -> Ahead[Item]:
        try:
            self._end = self._work.submit(self._make)
        except RuntimeError:  # no more threads: each is made when it is asked for
            self._is_closed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._work.__exit__(kind, error, at)

    def _make(self) -> None:
        try:
            for item in self._items:
                with self._change:
                    self._made.append(item)
                    self._held += self._nbytes(item)
                    self._change.notify_all()
                    self._change.wait_for(lambda: self._held < self._most or self._is_closed)
                if self._is_closed:
                    break
        finally:
            self._items.close()
            with self._change:
                self._is_closed = True
                self._change.notify_all()

    def __iter__(self) -> Iterator[Item]:
        if self._end is None:
            yield from self._items
            return
        while True:
            with self._change:
                self._change.wait_for(lambda: self._made or self._is_closed)
                if not self._made:
                    break
                item = self._made.popleft()
                self._held -= self._nbytes(item)
                self._change.notify_all()
            yield item
        self._end.result()
