"""What `ckpt.data` is: counts what the loop consumed, and starts again at any batch.

Owns:    the position of the run in its data, as it is counted, saved and read back.
Not:     where batches come from (`source`); triggers and checkpoints: the owner is told through `on_request` and
         `on_delivered`.
Holds:   prefetched batches do not count, delivered ones do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from stepwell import events
from stepwell.data.choose import make_source
from stepwell.data.cursor import Cursor
from stepwell.data.source import Source
from stepwell.data.stateful import StatefulSource
from stepwell.errors import DataError
from stepwell.types import Owner

_MOST_UNUSED = 1 << 16
"""A loop that never says what it used (an evaluation) must not fill memory."""


class Batches:
    """What `ckpt.data` is: iterating it yields what is left of the epoch. The outermost iterator counts."""

    def __init__(
        self,
        given: Any,
        on_start: Callable[[], None],
        on_request: Callable[[], None],
        on_delivered: Callable[[], None],
        on_unseekable: str = "error",
        emit: Callable[[events.Event], None] = lambda _: None,
    ) -> None:
        self._given = given
        self._on_unseekable, self._emit = on_unseekable, emit
        self._on_start = on_start
        self._on_request = on_request
        self._on_delivered = on_delivered
        self._source: Source | None = None
        self._is_exhausted = False
        self._unused: deque[Cursor] = deque(maxlen=_MOST_UNUSED)
        self._end: Cursor | None = None
        self._start = self.at = Cursor()

    def begin(self, seed: int, owner: Owner | None = None) -> None:
        """The run's seed and ranks are known: make the source. Raises DataError."""
        if self._given is not None:
            how = {"on_unseekable": self._on_unseekable, "emit": self._emit, "owner": owner or Owner()}
            self.attach(make_source(self._given, seed, **how))  # type: ignore[arg-type]

    def attach(self, source: Source) -> None:
        """Set the source."""
        self._source = source

    def seek(self, at: Cursor) -> None:
        """Go to a position; takes effect at the next `iter`."""
        self.at, self._end, self._is_exhausted = at, None, False
        self._unused.clear()

    def use(self, at: Cursor, batches: int | None) -> Cursor:
        """Of what was delivered after `at`, the loop has used so many batches (None: all). Returns where that leads."""
        for _ in range(len(self._unused) if batches is None else min(batches, len(self._unused))):
            at = self._unused.popleft()
        return at

    def start(self, epoch: int) -> Cursor:
        """Where an epoch begins: with `tail="carry"` after what the last batch of the one before took of it."""
        is_over = self._is_exhausted or self.is_at_end
        return self.following() if epoch == self.at.epoch + 1 and is_over else Cursor(epoch)

    def following(self) -> Cursor:
        """Where the next epoch begins, once this one is over."""
        return Cursor(self.at.epoch + 1) if self._source is None else self._source.following(self.at)

    @property
    def exactness(self) -> str | None:
        """What a resume promises: `exact`, `order` or `replay`; None without data."""
        return None if self._source is None else self._source.exactness

    def saved(self, at: Cursor, *, is_draft: bool = False) -> dict[str, Any]:
        """A position as a checkpoint keeps it. The end of an epoch is the start of the next, once that has begun.

        is_draft:  only the form counts. Otherwise raises DataError where only the source knows the position, and it
                   has moved on from there
        """
        at = self._start if at == self._end else at
        source, is_end = self._source, self._is_end(at)
        counted = source is not None and source.size() > 0
        data = {
            "samples": at.samples if counted else None,
            "length": None if source is None else source.length(),
            "order": None if source is None else source.order,
            "ended": is_end,
        }
        if isinstance(source, StatefulSource):
            if not is_draft:
                self._check_in_step(at)
            data["state"] = source.state()
        return {"epoch": at.epoch, "consumed": at.batches, "data": data}

    def _check_in_step(self, at: Cursor) -> None:
        if at == self.at or (self._is_exhausted and at == self.following()):
            return
        raise DataError(
            "batches were read after the last step, and only the source knows where it was before them: this position "
            "cannot be saved. Save right after a step, in a loop that does not read ahead",
            found=len(self._unused),
        )

    def drift(self, saved: dict[str, Any]) -> str:
        """Why the position of a checkpoint means another one with this source; empty if it does not."""
        data, source = saved.get("data", {}), self._source
        samples, length = data.get("samples") or 0, data.get("length")
        if source is None or not (saved["consumed"] or samples):
            return ""
        carried = samples - (length or 0)
        if data.get("ended") and (length is None or carried <= 0):
            return ""
        where = f"in the middle of epoch {saved['epoch'] + bool(data.get('ended'))}"
        if data.get("order") != source.order:
            return f"the samples came in the order {data.get('order')} and come in {source.order} now, {where}"
        if length != source.length():
            return f"the data set had {length} samples and has {source.length()} now, {where}"
        return ""

    def read(self, saved: dict[str, Any]) -> Cursor:
        """The position that a checkpoint tells of."""
        data, source, batches = saved.get("data", {}), self._source, saved["consumed"]
        if source is None or not source.size():
            return Cursor(saved["epoch"], batches)
        length, samples = source.length() or 0, data.get("samples")
        if samples is None:
            samples = min(length, batches * source.size())
        if not data.get("ended"):
            return Cursor(saved["epoch"], batches, min(length, samples))
        before = data.get("length")
        carried = 0 if before is None else max(0, samples - before)  # of the next epoch
        return Cursor(saved["epoch"], batches, length + carried)

    def load(self, saved: dict[str, Any]) -> None:
        """Give a source that has a state the one it had. Raises DataError."""
        data = saved.get("data", {})
        if isinstance(self._source, StatefulSource) and data.get("order") == self._source.order and "state" in data:
            self._source.load(data["state"], ended=saved["epoch"] if data.get("ended") else None)

    def _is_end(self, at: Cursor) -> bool:
        return self._source is not None and self._source.is_over(at)

    @property
    def is_exhausted(self) -> bool:
        """Whether the loop was told that nothing is left of the epoch."""
        return self._is_exhausted

    @property
    def is_used_up(self) -> bool:
        """Whether the loop has used what was delivered, as far as it said so."""
        return not self._unused

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left of the epoch (False if the length is not known)."""
        return self._is_end(self.at)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        count = None if self._source is None else self._source.left(Cursor())
        if count is None:
            raise TypeError("the length of the data is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        if self._given is None:
            raise DataError("no data= was given to the Checkpointer: iterate your own loader and call ckpt.step()")
        self._on_start()
        assert self._source is not None
        if self._is_exhausted:  # a loop without ckpt.epochs(): the next round is the next epoch
            self._start = self.following()
            self._end, self.at, self._is_exhausted = self.at, self._start, False
        batches, after, note = self._source.open(self.at), self._source.after, self._unused.append
        on_request, on_delivered = self._on_request, self._on_delivered
        while True:
            on_request()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            except Exception:
                on_request()  # workers may have died of the signal that tells us to leave: leave, then
                raise
            self.at = after(self.at)
            note(self.at)
            on_delivered()
            yield batch
