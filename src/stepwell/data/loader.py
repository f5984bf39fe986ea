"""A plain wrapper around the user's loader: counts what the loop consumed, and starts again at any batch.

Owns:    the loader behind `ckpt.data`, rebuilt around a sampler that begins anywhere, and the count of batches.
Not:     triggers and checkpoints: the owner is told through `on_request` and `on_delivered`.
Holds:   the order does not depend on the global generators and does not draw from them; a skipped batch is not read;
         prefetched batches do not count, delivered ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from stepwell.data.cursor import Cursor
from stepwell.data.sampler import epoch_seed, layers, make_sampler
from stepwell.errors import DataError

_HOW = (
    "stepwell resumes a torch DataLoader over a map-style data set, or a list of batches; "
    "for anything else leave data= out, track the source's own state, and call ckpt.step() at the end of the loop body"
)


class Source(Protocol):
    """Batches of an epoch from a position on."""

    def open(self, epoch: int, at: Cursor) -> Iterator[Any]:
        """Batches of `epoch` from a position on; what comes before it is not read."""
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

    def read(self, consumed: int, samples: int | None) -> Cursor:
        """The position that a checkpoint tells of: batches, and samples if it knew them."""
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

        self.after, self.length, self.read = self._sampler.after, self._sampler.length, self._sampler.read

    def open(self, epoch: int, at: Cursor) -> Iterator[Any]:
        self._sampler.seek(epoch, at)
        self._generator.manual_seed(epoch_seed(self._seed, epoch))
        return iter(self._loader)

    def left(self, at: Cursor) -> int | None:
        try:
            return self._sampler.left(at)
        except TypeError:
            return None


class SequenceSource:
    """A list of batches, in its own order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def open(self, epoch: int, at: Cursor) -> Iterator[Any]:
        return (self._batches[i] for i in range(at.batches, len(self._batches)))

    def after(self, at: Cursor) -> Cursor:
        return Cursor(at.batches + 1)

    def left(self, at: Cursor) -> int | None:
        return max(0, len(self._batches) - at.batches)

    def length(self) -> int | None:
        return None

    def read(self, consumed: int, samples: int | None) -> Cursor:
        return Cursor(consumed)


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
        is_given: bool,
        on_start: Callable[[], None],
        on_request: Callable[[], None],
        on_delivered: Callable[[], None],
    ) -> None:
        self._is_given = is_given
        self._on_start = on_start
        self._on_request = on_request
        self._on_delivered = on_delivered
        self._source: Source | None = None
        self._is_exhausted = False
        self.epoch = 0
        self.at = Cursor()

    def attach(self, source: Source) -> None:
        """Set the source, once the run's seed is known."""
        self._source = source

    def seek(self, epoch: int, at: Cursor) -> None:
        """Go to a position; takes effect at the next `iter`."""
        self.epoch, self.at, self._is_exhausted = epoch, at, False

    def after(self, at: Cursor, batches: int) -> Cursor:
        """The position so many batches further."""
        for _ in range(batches):
            at = Cursor(at.batches + 1) if self._source is None else self._source.after(at)
        return at

    def length(self) -> int | None:
        """Samples in an epoch, where the order depends on their number."""
        return None if self._source is None else self._source.length()

    def read(self, consumed: int, samples: int | None) -> Cursor:
        """The position that a checkpoint tells of."""
        return Cursor(consumed) if self._source is None else self._source.read(consumed, samples)

    @property
    def is_exhausted(self) -> bool:
        """Whether the loop was told that nothing is left of the epoch."""
        return self._is_exhausted

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left of the epoch (False if the length is not known)."""
        return self._source is not None and self._source.left(self.at) == 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        count = None if self._source is None else self._source.left(Cursor())
        if count is None:
            raise TypeError("the length of the data is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        if not self._is_given:
            raise DataError("no data= was given to the Checkpointer: iterate your own loader and call ckpt.step()")
        self._on_start()
        assert self._source is not None
        if self._is_exhausted:  # a loop without ckpt.epochs(): the next round is the next epoch
            self.seek(self.epoch + 1, Cursor())
        batches = self._source.open(self.epoch, self.at)
        while True:
            self._on_request()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            self.at = self._source.after(self.at)
            self._on_delivered()
            yield batch
