"""What `ckpt.data` is: counts what the loop consumed, and starts again at any batch.

Owns:    the position of the run in its data, as it is counted, saved and read back.
Not:     where batches come from (`source`), which of them the loop has used (`usage`), and what follows from that (the
         `Loop` that is attached).
Holds:   prefetched batches do not count, delivered ones do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from stepwell.errors import DataError
from stepwell.events import run_events
from stepwell.events.data_events import CountedAnew, Skipped
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.refusals import not_read
from stepwell.training.data.source import Source
from stepwell.training.data.source_choice import initial_seed, make_source
from stepwell.training.data.stateful import StatefulSource
from stepwell.training.data.usage import Usage
from stepwell.types import Owner


class Loop:
    """Who follows the loop. This one does not care."""

    @property
    def is_over(self) -> bool:
        """The run was ended in the loop body: there are no more batches."""
        return False

    def on_start(self) -> None:
        """An iterator begins."""

    def on_round(self) -> bool:
        """The loop begins again after the last batch of an epoch. Returns whether that is the next epoch: else the last
        batch comes again. Raises DataError inside `ckpt.epochs()`, which alone begins the next one there.
        """
        return True

    def on_request(self) -> None:
        """The next batch is asked for."""

    def on_delivered(self) -> None:
        """A batch goes to the loop."""

    def on_left(self) -> None:
        """The loop was left before the epoch was over."""


class Batches:
    """What `ckpt.data` is: iterating it yields what is left of the epoch. The newest iterator counts."""

    def __init__(
        self,
        given: Any,
        on_unseekable: str = "error",
        emit: Callable[[run_events.Event], None] = lambda _: None,
    ) -> None:
        self._given = given
        self._on_unseekable, self._emit = on_unseekable, emit
        self._loop = Loop()
        self._source: Source | None = None
        self._is_exhausted = self._is_left = self._has_delivered = False
        self._rounds = 0
        self._went_on: Cursor | None = None
        """In the middle of which epoch a restart went on, as long as the loop has not asked for that."""
        self.usage = Usage(lambda batches: emit(Skipped(batches=batches)))
        self._end: Cursor | None = None
        self._start = self.at = Cursor()
        self.is_placed_elsewhere = False
        """An adapter brings the loop's own loader to where it was: nobody has to skip anything."""

    def report_to(self, loop: Loop) -> None:
        """Who follows the loop from now on."""
        self._loop = loop

    def begin(self, seed: int, owner: Owner | None = None) -> None:
        """The run's seed and ranks are known: make the source. Raises DataError."""
        if self._given is not None:
            how = {"on_unseekable": self._on_unseekable, "emit": self._emit, "owner": owner or Owner()}
            self.attach(make_source(self._given, seed, **how))  # type: ignore[arg-type]

    @property
    def seed(self) -> int:
        """Of a new run's order, where none is given: what the script seeded for it."""
        return initial_seed(self._given)

    def attach(self, source: Source) -> None:
        """Set the source."""
        self._source = source

    def seek(self, at: Cursor) -> None:
        """Go to a position; takes effect at the next `iter`."""
        self.at, self._end = at, None
        self._is_exhausted = self._is_left = self._has_delivered = False
        self.usage.seek(at)

    def count(self, batches: int | None, *, early: int = 0) -> int:
        """`step()` says what its body used; `early` of it was counted before. A loader of the loop's own is counted
        by the calls. Returns how many batches more are used. Raises DataError if that cannot be known.
        """
        if self._given is not None:
            if self.is_unread and batches is None:
                raise not_read()
            return self.usage.use(batches, early=early)
        more = max(0, (1 if batches is None else batches) - early)
        self.at = self.at._replace(batches=self.at.batches + more)
        self.usage.seek(self.at)
        return more

    def count_body(self) -> int:
        """A loop body has made its step, and has not said yet what it used."""
        return self.count(1) if self._given is None else self.usage.use_body()

    @property
    def index(self) -> int:
        """Batches of this epoch that were delivered so far, in this process and before.

        `for i, batch in enumerate(ckpt.data, ckpt.data.index)` counts on after a restart in the middle of an epoch.
        """
        self._went_on = None
        return 0 if self._is_next_round else self.at.batches

    def start(self, epoch: int) -> Cursor:
        """Where an epoch begins: with `tail="carry"` after what the last batch of the one before took of it."""
        is_over = self._is_exhausted or self.is_at_end
        if self._is_left and (began := self._went_on) is not None:
            self._went_on = None
            where = {"epoch": self.at.epoch, "batches": self.at.batches}
            self._emit(CountedAnew(began=began.epoch, before=began.batches, **where))
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
        source, is_end = self._source, self.is_end(at)
        counted = source is not None and source.size() > 0
        data = {
            "samples": at.samples if counted else None,
            "length": None if source is None else source.length(),
            "order": None if source is None else source.order,
            "ended": is_end,
            "keeps_up": self.usage.keeps_up,
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
            "batches were read after the last step, and only the source knew its position before them: "
            "this position cannot be saved. Save right after a step, in a loop that does not prefetch",
            found=self.usage.at.batches,
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
            return f"the samples were in the order {data.get('order')} and are in {source.order} now, {where}"
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
        """What is known of the loop; and a source that has a state gets the one it had. Raises DataError."""
        data = saved.get("data", {})
        self.usage.keeps_up = self.usage.is_hearsay = data.get("keeps_up") is True
        self._went_on = self.at if self.at.batches and not self.is_at_end else None
        if isinstance(self._source, StatefulSource) and data.get("order") == self._source.order and "state" in data:
            self._source.load(data["state"], ended=saved["epoch"] if data.get("ended") else None)

    def is_end(self, at: Cursor) -> bool:
        """Whether nothing of its epoch is left after a position (False if the length is not known)."""
        return self._source is not None and self._source.is_over(at)

    @property
    def is_counted_only(self) -> bool:
        """The loop reads a loader of its own: it is known how many batches it used, not which."""
        return self._given is None

    @property
    def is_unread(self) -> bool:
        """`data=` was given, and no loop of this process has begun to iterate `ckpt.data`."""
        return self._given is not None and not self._rounds

    @property
    def is_over(self) -> bool:
        """Whether the loop was told that nothing is left of the epoch."""
        return self._is_exhausted

    @property
    def is_left(self) -> bool:
        """Whether the loop was left by `break`, or by a consumer that asked for no more."""
        return self._is_left

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left of the epoch (False if the length is not known)."""
        return self.is_end(self.at)

    @property
    def reached(self) -> Cursor:
        """The position in the middle of a step: after all that the loop did something with."""
        return self.usage.reached(is_over=self._is_exhausted)

    @property
    def _is_next_round(self) -> bool:
        """Whether an iterator that begins now begins the next epoch: this process has delivered the last batch."""
        return self._is_exhausted or (self._has_delivered and self.is_at_end)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        count = None if self._source is None else self._source.left(Cursor())
        if count is None:
            raise TypeError("the length of the data is not known")
        return count

    def __bool__(self) -> bool:
        """There is something to iterate, if `data=` was given."""
        return self._given is not None

    def __iter__(self) -> Iterator[Any]:
        if self._given is None:
            raise DataError("the Checkpointer has no data=: iterate your own loader and call ckpt.step()")
        self._loop.on_start()
        assert self._source is not None
        if self._is_next_round and self._loop.on_round():  # without ckpt.epochs() the next round is the next epoch
            self._start = self.following()
            self._end, self.at = self.at, self._start
        elif not isinstance(self._source, StatefulSource):
            self.at = self.usage.take_back()
        self._is_exhausted = self._is_left = self._has_delivered = False
        self._rounds += 1
        return self._deliver(self._source.open(self.at), self._source.after, self._rounds)

    def _deliver(self, batches: Iterator[Any], after: Callable[[Cursor], Cursor], round: int) -> Iterator[Any]:
        on_request, on_delivered, deliver = self._loop.on_request, self._loop.on_delivered, self.usage.deliver
        while True:
            self._refuse_older(round)
            if self._loop.is_over:
                return
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
            self._has_delivered = True
            deliver(self.at)
            on_delivered()
            try:
                yield batch
            except GeneratorExit:
                if round == self._rounds and not sys.is_finalizing():
                    self._is_left = True
                    self._loop.on_left()
                raise

    def _refuse_older(self, round: int) -> None:
        if round != self._rounds:
            raise DataError(
                "another iterator over ckpt.data was started after this one, and there is only one position: "
                "iterate ckpt.data in one place at a time"
            )
