"""Where batches come from: a torch DataLoader or a list, opened at any position.

Owns:    what every source answers, and the sources whose positions we compute ourselves.
Holds:   the order does not depend on the global generators and does not draw from them; a skipped batch is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from stepwell.errors import DataError
from stepwell.training.data.augment import Keyed, preserved
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.sampler import CountsBatches, PlainSampler, Skipping, epoch_seed, layers, make_sampler

HOW = (
    "stepwell resumes a torch DataLoader over a map-style data set, a list of batches, and any "
    "object with `state_dict` and `load_state_dict` (such as torchdata's StatefulDataLoader); "
    "for anything else pass on_unseekable='replay', or drop data=, track the source's own state, "
    "and call ckpt.step() at the end of the loop body"
)


class Source(Protocol):
    """Batches from any position on."""

    @property
    def order(self) -> str | None:
        """Name of the order of the samples, where it is one of ours."""
        ...

    @property
    def exactness(self) -> str:
        """What is the same after a resume: `exact` (every byte), `order` (which samples), `replay` (read again)."""
        ...

    def open(self, at: Cursor) -> Iterator[Any]:
        """Batches of an epoch from a position on; what comes before it is not read."""
        ...

    def after(self, at: Cursor) -> Cursor:
        """The position one batch further."""
        ...

    def following(self, at: Cursor) -> Cursor:
        """The start of the next epoch, seen from the end of this one."""
        ...

    def left(self, at: Cursor) -> int | None:
        """Batches (of this rank) from a position to the end of the epoch, if known."""
        ...

    def is_over(self, at: Cursor) -> bool:
        """Whether nothing is left of the epoch, for any rank; False if that is not known."""
        ...

    def length(self) -> int | None:
        """Samples in an epoch, where the order depends on their number."""
        ...

    def size(self) -> int:
        """Samples in a batch, over all ranks; zero where only batches count."""
        ...


def rebuilt(loader: DataLoader[Any], generator: torch.Generator, **changed: Any) -> DataLoader[Any]:
    """The same loader with another generator for the seeds of its workers: the global one stays untouched.

    in_order is not carried over: batches in the order of arrival have no positions to come back to.
    """
    kept: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return DataLoader(**{**kept, "generator": generator, **changed})


class LoaderSource:
    """A torch DataLoader over a map-style data set, rebuilt around a sampler that can skip.

    keyed:  randomness of each sample by its key; None: in worker processes only. In the trainer's own process it
            would have to be told apart from the model's, and comes back exactly with the trainer's generators anyway
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        *,
        keyed: bool | None = None,
        sampler: PlainSampler | None = None,
    ) -> None:
        batched = loader.batch_sampler is not None
        self._keyed = loader.num_workers > 0 if keyed is None else keyed
        self._sampler: PlainSampler | Skipping = sampler or checked(loader, seed, keyed=self._keyed)
        self._generator = torch.Generator()
        self._seed = seed
        self._loader = rebuilt(
            loader,
            self._generator,
            dataset=Keyed(loader.dataset, seed) if self._keyed else loader.dataset,
            batch_size=1 if batched else None,
            batch_sampler=self._sampler if batched else None,
            sampler=None if batched else self._sampler,
        )
        self.order = self._sampler.order
        self.after, self.following = self._sampler.after, self._sampler.following
        self.left, self.is_over = self._sampler.left, self._sampler.is_over
        self.length, self.size = self._sampler.length, self._sampler.size
        self.exactness = "exact" if self._keyed or not loader.num_workers else "order"

    def open(self, at: Cursor) -> Iterator[Any]:
        self._sampler.seek(at)
        self._generator.manual_seed(epoch_seed(self._seed, at.epoch))
        batches = iter(self._loader)
        return preserved(batches) if self._keyed and not self._loader.num_workers else batches


def checked(loader: DataLoader[Any], seed: int, *, keyed: bool) -> PlainSampler | Skipping:
    """The sampler in the place of the loader's. Raises DataError.

    A class of the user's own may shuffle as it likes: only what it lets us set counts, not what it inherits from.
    """
    given = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for inner in layers(given):
        known = type(inner) in (BatchSampler, SequentialSampler, list, tuple, range) or hasattr(inner, "generator")
        if not (known or callable(getattr(inner, "set_epoch", None))):
            raise DataError(
                f"cannot restore the position of the sampler {type(inner).__qualname__}: give it a "
                f"`generator` attribute or a `set_epoch` method that alone determines its order. {HOW}",
                found=type(inner).__qualname__,
            )
    return make_sampler(given, seed, keyed=keyed)


class SequenceSource(CountsBatches):
    """A list of batches, in its own order."""

    exactness = "exact"

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def open(self, at: Cursor) -> Iterator[Any]:
        return (self._batches[i] for i in range(at.batches, len(self._batches)))

    def left(self, at: Cursor) -> int | None:
        return max(0, len(self._batches) - at.batches)
