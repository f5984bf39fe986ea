"""A plain wrapper around the user's loader: counts what the loop consumed, and starts again at any batch.

Owns:    the loader behind `ckpt.data`, rebuilt around a sampler that begins anywhere, and the count of batches.
Not:     triggers and checkpoints: the owner is told through `on_request` and `on_delivered`.
Holds:   the order does not depend on the global generators and does not draw from them; a skipped batch is not read;
         prefetched batches do not count, delivered ones do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from stepwell.data.cursor import Cursor
from stepwell.data.sampler import CountsBatches, epoch_seed, layers, make_sampler
from stepwell.errors import DataError

_HOW = (
    "stepwell resumes a torch DataLoader over a map-style data set, or a list of batches; "
    "for anything else leave data= out, track the source's own state, and call ckpt.step() at the end of the loop body"
)
_MOST_UNUSED = 1 << 16
"""A loop that never says what it used (an evaluation) must not fill memory."""


class Source(Protocol):
    """Batches from any position on."""

    @property
    def order(self) -> str | None:
        """Name of the order of the samples, where it is one of ours."""
        ...

    def open(self, at: Cursor) -> Iterator[Any]:
        """Batches of an epoch from a position on; what comes before it is not read."""
        ...

    def after(self, at: Cursor) -> Cursor:
        """The position one batch further."""
        ...

    def left(self, at: Cursor) -> int | None:
        """Batches from a position to the end of the epoch, if known."""
        ...

    def length(self) -> int | None:
        """Samples in an epoch, where the order depends on their number."""
        ...

    def size(self) -> int:
        """Samples in a batch; zero where only batches count."""
        ...


def _check_sampler(sampler: Any) -> None:
    """A class of the user's own may shuffle as it likes: only what it lets us set counts, not what it inherits from."""
    for inner in layers(sampler):
        known = type(inner) in (BatchSampler, SequentialSampler, list, tuple, range) or hasattr(inner, "generator")
        if not (known or callable(getattr(inner, "set_epoch", None))):
            raise DataError(
                f"the sampler {type(inner).__qualname__} cannot be brought back to a position: give it a `generator` "
                f"attribute or a `set_epoch` method on which alone its order depends. {_HOW}",
                found=type(inner).__qualname__,
            )


class LoaderSource:
    """A torch DataLoader over a map-style data set, rebuilt around a sampler that can skip."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise DataError(f"an IterableDataset ({type(loader.dataset).__qualname__}) has no positions. {_HOW}")
        batched = loader.batch_sampler is not None
        inner = loader.batch_sampler if batched else loader.sampler
        _check_sampler(inner)
        self._sampler = make_sampler(inner, seed)
        self._generator = torch.Generator()
        self._seed = seed
        # in_order is not carried over: batches in the order of arrival have no positions to come back to.
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=1 if batched else None,
            batch_sampler=self._sampler if batched else None,
            sampler=None if batched else self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,  # worker seeds come from here: the global generator stays untouched
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.order = self._sampler.order
        self.after, self.length, self.size = self._sampler.after, self._sampler.length, self._sampler.size

    def open(self, at: Cursor) -> Iterator[Any]:
        self._sampler.seek(at)
        self._generator.manual_seed(epoch_seed(self._seed, at.epoch))
        return iter(self._loader)

    def left(self, at: Cursor) -> int | None:
        try:
            return self._sampler.left(at)
        except TypeError:
            return None


class SequenceSource(CountsBatches):
    """A list of batches, in its own order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def open(self, at: Cursor) -> Iterator[Any]:
        return (self._batches[i] for i in range(at.batches, len(self._batches)))

    def left(self, at: Cursor) -> int | None:
        return max(0, len(self._batches) - at.batches)


def make_source(data: Any, seed: int) -> Source:
    """The source behind what the user gave as data=. Raises DataError for what cannot be resumed."""
    if isinstance(data, DataLoader):
        if type(data).__iter__ is not DataLoader.__iter__:
            raise DataError(f"{type(data).__qualname__} iterates in its own way. {_HOW}", found=type(data).__qualname__)
        return LoaderSource(data, seed)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict | str):
        return SequenceSource(data)
    raise DataError(f"data= is a {type(data).__qualname__}. {_HOW}", found=type(data).__qualname__)


class Batches:
    """What `ckpt.data` is: iterating it yields what is left of the epoch. The outermost iterator counts."""

    def __init__(
        self,
        given: Any,
        on_start: Callable[[], None],
        on_request: Callable[[], None],
        on_delivered: Callable[[], None],
    ) -> None:
        self._given = given
        self._on_start = on_start
        self._on_request = on_request
        self._on_delivered = on_delivered
        self._source: Source | None = None
        self._is_exhausted = False
        self._unused: deque[Cursor] = deque(maxlen=_MOST_UNUSED)
        self._end: Cursor | None = None
        self.at = Cursor()

    def begin(self, seed: int) -> None:
        """The run's seed is known: make the source. Raises DataError."""
        if self._given is not None:
            self.attach(make_source(self._given, seed))

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

    def saved(self, at: Cursor) -> dict[str, Any]:
        """A position as a checkpoint keeps it. The end of an epoch is the start of the next, once that has begun."""
        at = Cursor(self.at.epoch) if at == self._end else at
        source, is_end = self._source, self._is_end(at)
        counted = source is not None and source.size() > 0
        data = {
            "samples": at.samples if counted else None,
            "length": None if source is None else source.length(),
            "order": None if source is None else source.order,
            "ended": is_end,
        }
        return {"epoch": at.epoch, "consumed": at.batches, "data": data}

    def drift(self, saved: dict[str, Any]) -> str:
        """Why the position of a checkpoint means another one with this source; empty if it does not."""
        data, source = saved.get("data", {}), self._source
        if source is None or not saved["consumed"] or data.get("ended"):
            return ""
        where = f"in the middle of epoch {saved['epoch']}"
        if data.get("order") != source.order:
            return f"the samples came in the order {data.get('order')} and come in {source.order} now, {where}"
        if data.get("length") != source.length():
            return f"the data set had {data.get('length')} samples and has {source.length()} now, {where}"
        return ""

    def read(self, saved: dict[str, Any]) -> Cursor:
        """The position that a checkpoint tells of."""
        data, source, batches = saved.get("data", {}), self._source, saved["consumed"]
        if source is None or not source.size():
            return Cursor(saved["epoch"], batches)
        length, samples = source.length() or 0, data.get("samples")
        if data.get("ended"):
            samples = length
        return Cursor(saved["epoch"], batches, min(length, batches * source.size() if samples is None else samples))

    def _is_end(self, at: Cursor) -> bool:
        return self._source is not None and self._source.left(at) == 0

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
            self._end, self.at, self._is_exhausted = self.at, Cursor(self.at.epoch + 1), False
        batches = self._source.open(self.at)
        while True:
            self._on_request()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            self.at = self._source.after(self.at)
            self._unused.append(self.at)
            self._on_delivered()
            yield batch
