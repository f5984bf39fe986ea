"""A progress bar on stderr for what takes longer than two seconds at a terminal; silent otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_SECONDS: Final = 2.0


class Bar:
    """Counts (bytes, or another `unit`); shows itself once it is clear that this takes long. `add`: from any thread."""

    def __init__(self, title: str, total: int, *, is_terminal: bool, unit: str = "bytes") -> None:
        self._title = title
        self._unit = unit
        self._total = total
        self._done = 0
        self._due = time.monotonic() + PATIENCE_SECONDS if is_terminal else float("inf")
        self._turns = iter((True,))  # whoever takes the one turn starts the bar
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count  # two threads may lose a piece to each other; the bar ends full all the same
        progress, task = self._progress, self._task
        if progress is not None and task is not None:
            progress.update(task, completed=self._done)
        elif time.monotonic() > self._due and next(self._turns, False):
            self._start()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        done = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        self._task = progress.add_task(self._title, total=self._total, completed=self._done)
        self._progress = progress

    def stop(self) -> None:
        """Take it off the terminal."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def bar(title: str, total: int, *, unit: str = "bytes") -> Iterator[Bar]:
    """A bar for the time of a block."""
    shown = Bar(title, total, is_terminal=sys.stderr.isatty(), unit=unit)
    try:
        yield shown
    finally:
        shown.stop()
