"""Sources that cannot be brought back to a position: read from the start of the epoch again, and thrown away.

Only with `on_unseekable="replay"`. Right only if the source yields the same batches each time it is iterated: where it
shuffles by the global generators, or by the clock, it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from stepwell.errors import DataError
from stepwell.events.data_events import Replay
from stepwell.events.progress_bar import bar
from stepwell.events.run_events import Event
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.sampler import CountsBatches


class ReplaySource(CountsBatches):
    """Any iterable. Told its epoch if it has `set_epoch`."""

    exactness = "replay"

    def __init__(self, batches: Any, emit: Callable[[Event], None], prepare: Callable[[int], None]) -> None:
        self._batches, self._emit, self._prepare = batches, emit, prepare

    def open(self, at: Cursor) -> Iterator[Any]:
        self._prepare(at.epoch)
        if callable(getattr(self._batches, "set_epoch", None)):
            self._batches.set_epoch(at.epoch)
        batches: Iterator[Any] = iter(self._batches)
        if at.batches:
            self._skip(batches, at)
        return batches

    def _skip(self, batches: Iterator[Any], at: Cursor) -> None:
        started = time.monotonic()
        with bar(f"reading epoch {at.epoch} again", at.batches, unit="batches") as shown:
            for number in range(at.batches):
                try:
                    next(batches)
                except StopIteration:
                    raise DataError(
                        f"the source ended after {number} batches, but {at.batches} of epoch {at.epoch} were used "
                        "before: the source has changed, so its position cannot be restored",
                        expected=at.batches,
                        found=number,
                    ) from None
                shown.add(1)
        self._emit(Replay(epoch=at.epoch, batches=at.batches, seconds=time.monotonic() - started))

    def left(self, at: Cursor) -> int | None:
        try:
            return max(0, len(self._batches) - at.batches)
        except (TypeError, NotImplementedError):
            return None
