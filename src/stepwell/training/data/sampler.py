"""Samplers that begin at any batch of any epoch.

Owns:    which samples make up a batch, from a position on.
Holds:   the order is a function of (seed, epoch) alone; nothing is drawn from a global generator; plain samplers of
         torch are replaced by arithmetic, so that a position in the middle costs what the first one costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from stepwell.training.data.augment import Ticket
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.cut import Cut
from stepwell.training.data.permutation import ORDER, Permutation

_AT_ONCE: Final = 32768
"""Samples; the first batch is computed alone, so that a resume does not wait for the others."""


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed of an epoch's order: hashed, so that neighbouring seeds and epochs share nothing."""
    digest = hashlib.blake2b(f"stepwell.order/1:{seed}:{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_sampler(inner: Any, seed: int, *, keyed: bool = False) -> PlainSampler | Skipping:
    """The same batches (or samples) as this (batch) sampler of torch: computed where it is a plain one.

    torch's DistributedSampler keeps its rank, number of replicas and shuffling; which rank gets which sample changes.
    """
    each, size, drop_last = inner, None, False
    if type(inner) is BatchSampler:
        each, size, drop_last = inner.sampler, inner.batch_size, inner.drop_last
    if type(each) is DistributedSampler:
        tail = "drop" if drop_last or each.drop_last else "pad"
        cut = Cut(size or 1, tail, each.rank, each.num_replicas)
        samples: Any = each.dataset
        return PlainSampler(samples, cut, seed if each.shuffle else None, batched=size is not None, keyed=keyed)
    if type(each) is SequentialSampler or (type(each) is RandomSampler and _takes_each_once(each)):
        cut = Cut(size or 1, "drop" if drop_last else "partial")
        shuffled = type(each) is RandomSampler
        return PlainSampler(each.data_source, cut, seed if shuffled else None, batched=size is not None, keyed=keyed)
    return Skipping(inner, seed, keyed=keyed)


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class PlainSampler(Sampler[Any]):
    """Each sample once, shuffled (with a `seed`) or as they lie, in batches or (not `batched`) one by one.

    `keyed`: yields tickets for a `Keyed` data set in the place of indices.
    """

    def __init__(
        self, samples: Sized, cut: Cut, seed: int | None, *, batched: bool = True, keyed: bool = False
    ) -> None:
        self._samples, self._cut, self._seed = samples, cut, seed
        self._batched, self._keyed = batched, keyed
        self._known: tuple[int, int, Permutation] | None = None
        self._at = Cursor()

    def seek(self, at: Cursor) -> None:
        """Where the next iteration begins."""
        self._at = at

    def after(self, at: Cursor) -> Cursor:
        """Where one batch more leads to."""
        return self._cut.after(at, len(self._samples))

    def left(self, at: Cursor) -> int:
        """How many batches are left of the epoch."""
        return self._cut.left(at, len(self._samples))

    def is_over(self, at: Cursor) -> bool:
        """Whether nothing is left of the epoch, for any rank."""
        return self._cut.is_over(at, len(self._samples))

    def following(self, at: Cursor) -> Cursor:
        """The start of the next epoch."""
        return self._cut.following(at, len(self._samples))

    @property
    def order(self) -> str:
        """Names the order of the samples."""
        return "sequential" if self._seed is None else ORDER

    def length(self) -> int | None:
        """Samples of an epoch: the order is another one if it changes."""
        return len(self._samples)

    def size(self) -> int:
        """Samples of a batch, over all ranks; zero where only batches count."""
        return self._cut.whole

    def __len__(self) -> int:
        return self.left(self._at)

    def __iter__(self) -> Iterator[Any]:
        return self._from(self._at)  # now: it may be another place when the first batch is asked for

    def _from(self, start: Cursor) -> Iterator[Any]:
        (epoch, _, at), cut, length = start, self._cut, len(self._samples)
        inside, order = max(0, length - at) // cut.whole, self._order(epoch)
        size, is_plain = cut.size, self._batched and not self._keyed
        first, count = 0, 1
        while first < inside:
            count = min(count, inside - first)
            starts = torch.arange(first, first + count) * cut.whole + (at + cut.rank * cut.size)
            numbers = order((starts[:, None] + torch.arange(cut.size)).reshape(-1)).tolist()
            for begin in range(0, count * size, size):
                batch = numbers[begin : begin + size]
                yield batch if is_plain else self._made(batch, epoch)
            first, count = first + count, max(1, min(16 * count, _AT_ONCE // cut.size))
        if cut.left(start, length) > inside:
            yield self._last(epoch, cut.positions(at + inside * cut.whole, length), length)

    def _last(self, epoch: int, positions: range, length: int) -> Any:
        """The batch that does not lie inside the epoch: shorter, or gone on after its end."""
        if self._cut.tail != "carry":
            found = self._order(epoch)(torch.tensor([place % length for place in positions], dtype=torch.int64))
            return self._made(found.tolist(), epoch)
        numbers: list[int] = []
        epochs = [epoch + place // length for place in positions]
        for each in range(epochs[0], epochs[-1] + 1):
            places = [place % length for place, its in zip(positions, epochs, strict=True) if its == each]
            numbers += self._order(each)(torch.tensor(places, dtype=torch.int64)).tolist()
        return self._made(numbers, epochs)

    def _order(self, epoch: int) -> Any:
        """Samples at positions of an epoch."""
        if self._seed is None:
            return lambda positions: positions
        if self._known is None or self._known[:2] != (epoch, len(self._samples)):
            made = Permutation(len(self._samples), seed=self._seed, epoch=epoch)
            self._known = epoch, len(self._samples), made
        return self._known[2].at

    def _made(self, numbers: list[int], epochs: int | list[int]) -> Any:
        if self._batched:
            return Ticket(numbers, epochs) if self._keyed else numbers
        epoch = epochs if isinstance(epochs, int) else epochs[0]
        return Ticket(numbers[0], epoch) if self._keyed else numbers[0]


class CountsBatches:
    """What a source says of itself that knows batches only: their order is its own, and samples do not count."""

    order: str | None = None

    def after(self, at: Cursor) -> Cursor:
        """Where one batch more leads to."""
        return Cursor(at.epoch, at.batches + 1)

    def left(self, at: Cursor) -> int | None:
        """How many batches are left of the epoch, if that is known."""
        raise NotImplementedError

    def is_over(self, at: Cursor) -> bool:
        """Whether nothing is left of the epoch, as far as is known."""
        return self.left(at) == 0

    def following(self, at: Cursor) -> Cursor:
        """The start of the next epoch."""
        return Cursor(at.epoch + 1)

    def length(self) -> int | None:
        """Not known in samples."""
        return None

    def size(self) -> int:
        """Only batches count."""
        return 0


class Skipping(CountsBatches, Sampler[Any]):
    """What any other sampler yields in this epoch, less what was consumed before."""

    def __init__(self, inner: Any, seed: int, *, keyed: bool = False) -> None:
        self._inner, self._seed, self._keyed = inner, seed, keyed
        self._at = Cursor()

    def seek(self, at: Cursor) -> None:
        """Where the next iteration begins."""
        self._at = at

    def left(self, at: Cursor) -> int | None:
        try:
            return max(0, len(self._inner) - at.batches)
        except TypeError:
            return None

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._at.batches)

    def __iter__(self) -> Iterator[Any]:
        return self._from(self._at)

    def _from(self, start: Cursor) -> Iterator[Any]:
        _reseed(self._inner, self._seed, start.epoch)
        for number, indices in enumerate(self._inner):
            if number >= start.batches:
                yield Ticket(indices, start.epoch, number) if self._keyed else indices


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
