"""Saves that were asked for in the middle of a step: they wait until it is over.

Owns:    the handles that users hold meanwhile.
Holds:   the thread that trains cannot wait for a save that waits for it: it gets an error that says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from stepwell.errors import PersistError, StateError
from stepwell.training.loop.completion import Explained
from stepwell.training.loop.save_handle import SaveHandle

T = TypeVar("T")


class _Late(Explained[T]):
    """A future of a save that has not begun. Waiting for it in the thread that made it is refused until it has."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step, self._thread, self._has_begun = step, threading.get_ident(), False

    def follow(self, other: Future[T]) -> None:
        """The save has begun: end as this one does."""
        self._has_begun = True
        if isinstance(other, Explained):
            self.explain, self.slice_seconds = other.explain, other.slice_seconds
        other.add_done_callback(self._end)

    def _end(self, other: Future[T]) -> None:
        if not self.set_running_or_notify_cancel():
            return
        error = other.exception(0)
        if error is None:
            self.set_result(other.result(0))
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        self._refuse()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse()
        return super().exception(timeout)

    def _refuse(self) -> None:
        if not (self._has_begun or self.done()) and threading.get_ident() == self._thread:
            raise StateError(
                f"save() was called in the middle of step {self._step}: stepwell saves when that step is "
                "over, so you cannot wait for it before. Call save() after optimizer.step(), or wait in a "
                "later iteration",
                step=self._step,
            )


@dataclass(frozen=True)
class Request:
    """A save that waits for the end of its step."""

    name: str | None
    files: dict[str, str]
    staged: _Late[None]
    uploaded: _Late[str]

    def answer(self, take: Callable[[str | None, dict[str, str]], SaveHandle]) -> Exception | None:
        """Take it now. Returns what went wrong, which whoever waits for it gets too."""
        try:
            self.follow(take(self.name, self.files))
        except Exception as error:
            self.fail(error)
            return error
        return None

    def follow(self, handle: SaveHandle) -> None:
        """It has begun."""
        self.staged.follow(handle.staging_completion)
        self.uploaded.follow(handle.upload_completion)

    def fail(self, error: Exception) -> None:
        """It never will."""
        for future in (self.staged, self.uploaded):
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class DeferredSave:
    """The saves of one run that wait."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, step: int, *, name: str | None, files: dict[str, str]) -> SaveHandle:
        """One more, to be taken at the end of this step."""
        staged: _Late[None] = _Late(step)
        uploaded: _Late[str] = _Late(step)
        self._requests.append(Request(name, files, staged, uploaded))
        return SaveHandle(step, staged, uploaded)

    def take(self) -> list[Request]:
        """All that wait. They wait no longer."""
        requests, self._requests = self._requests, []
        return requests

    def fail_all(self, why: Any) -> None:
        """The step will not end."""
        for request in self.take():
            request.fail(PersistError(f"the save was postponed to the end of its step, and {why}"))
