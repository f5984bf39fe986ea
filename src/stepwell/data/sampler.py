"""Samplers that begin at any batch of any epoch.

Owns:    which samples make up a batch, from a position on.
Holds:   the order is a function of (seed, epoch) alone; nothing is drawn from a global generator; plain samplers of
         torch are replaced by arithmetic, so that a position in the middle costs what the first one costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from stepwell.data.cursor import Cursor
from stepwell.data.permutation import ORDER, Permutation


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed of an epoch's order: hashed, so that neighbouring seeds and epochs share nothing."""
    digest = hashlib.blake2b(f"stepwell.order/1:{seed}:{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_sampler(inner: Any, seed: int) -> Plain | Skipping:
    """The same batches (or samples) as this (batch) sampler of torch: computed where it is a plain one."""
    each, batch_size, drop_last = inner, None, False
    if type(inner) is BatchSampler:
        each, batch_size, drop_last = inner.sampler, inner.batch_size, inner.drop_last
    if type(each) is SequentialSampler or (type(each) is RandomSampler and _takes_each_once(each)):
        return Plain(each.data_source, batch_size, drop_last, seed if type(each) is RandomSampler else None)
    return Skipping(inner, seed)


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class Plain(Sampler[Any]):
    """Each sample once, shuffled (with a `seed`) or as they lie, in batches or (without `batch_size`) one by one."""

    def __init__(self, samples: Sized, batch_size: int | None, drop_last: bool, seed: int | None) -> None:
        self._samples, self._batch_size, self._drop_last, self._seed = samples, batch_size, drop_last, seed
        self._at = Cursor()

    def seek(self, at: Cursor) -> None:
        """Where the next iteration begins."""
        self._at = at

    def after(self, at: Cursor) -> Cursor:
        """Where one batch more leads to."""
        return Cursor(at.epoch, at.batches + 1, min(at.samples + (self._batch_size or 1), len(self._samples)))

    def left(self, at: Cursor) -> int:
        """How many batches are left of the epoch."""
        samples, size = max(0, len(self._samples) - at.samples), self._batch_size or 1
        return samples // size if self._drop_last else -(-samples // size)

    @property
    def order(self) -> str:
        """Names the order of the samples."""
        return "sequential" if self._seed is None else ORDER

    def length(self) -> int | None:
        """Samples of an epoch: the order is another one if it changes."""
        return len(self._samples)

    def size(self) -> int:
        """Samples of a batch; zero where only batches count."""
        return self._batch_size or 1

    def __len__(self) -> int:
        return self.left(self._at)

    def __iter__(self) -> Iterator[Any]:
        if self._seed is None:
            numbers: Iterator[int] = iter(range(self._at.samples, len(self._samples)))
        else:
            order = Permutation(len(self._samples), seed=self._seed, epoch=self._at.epoch)
            numbers = order.iterate(self._at.samples)
        if self._batch_size is None:
            yield from numbers
            return
        for _ in range(len(self)):
            yield list(islice(numbers, self._batch_size))


class CountsBatches:
    """What a source says of itself that knows batches only: their order is its own, and samples do not count."""

    order: str | None = None

    def after(self, at: Cursor) -> Cursor:
        """Where one batch more leads to."""
        return Cursor(at.epoch, at.batches + 1)

    def length(self) -> int | None:
        """Not known in samples."""
        return None

    def size(self) -> int:
        """Only batches count."""
        return 0


class Skipping(CountsBatches, Sampler[Any]):
    """What any other sampler yields in this epoch, less what was consumed before."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._seed = inner, seed
        self._at = Cursor()

    def seek(self, at: Cursor) -> None:
        """Where the next iteration begins."""
        self._at = at

    def left(self, at: Cursor) -> int:
        """How many batches are left of the epoch. Raises TypeError if the sampler does not know."""
        return max(0, len(self._inner) - at.batches)

    def __len__(self) -> int:
        return self.left(self._at)

    def __iter__(self) -> Iterator[Any]:
        _reseed(self._inner, self._seed, self._at.epoch)
        for number, indices in enumerate(self._inner):
            if number >= self._at.batches:
                yield indices


def _reseed(sampler: Any, seed: int, epoch: int) -> None:
    """Make a sampler's order a function of (seed, epoch)."""
    for inner in layers(sampler):
        if hasattr(inner, "generator"):
            inner.generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
        if callable(getattr(inner, "set_epoch", None)):
            inner.set_epoch(epoch)


def layers(sampler: Any) -> list[Any]:
    """A batch sampler, the sampler it draws from, and so on."""
    found = [sampler]
    while isinstance(found[-1], BatchSampler):
        found.append(found[-1].sampler)
    return found
