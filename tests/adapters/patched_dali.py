"""What CheckFreq's patch makes of DALI's reader and iterator, as far as a script sees it.

The patched DALI of 2020 needs CUDA 10 and cannot run here. Its contract, from the patch itself: with `resume_size`
`_size` is what is left of the first epoch, up to the first `reset()`, and `_orig_size` a whole one; a size of zero, and
a `resume_index` beyond the shard, are refused; an unfinished epoch is not reset; the order depends on the epoch alone.
"""

from __future__ import annotations

import random

import torch


class Reader:
    """One shard of `samples` numbers; begins at any index of any epoch."""

    def __init__(self, samples: int, *, shard_id: int = 0, num_shards: int = 1, index: int = 0, epoch: int = 0) -> None:
        self._samples, self.size = samples, samples // num_shards
        assert 0 <= index <= self.size, "Resume index cannot be larger than shard size"
        self._first, self._index, self._epoch = shard_id * self.size, index, epoch

    def read(self, count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            if self._index == self.size:
                self._index, self._epoch = 0, self._epoch + 1
            order = random.Random(self._epoch).sample(range(self._samples), self._samples)
            found.append(order[self._first + self._index])
            self._index += 1
        return found


class PatchedIterator:
    """Batches of a reader, with the attributes and the endings of the patched iterator."""

    def __init__(self, reader: Reader, batch_size: int, size: int, *, resume_size: int = -1, by: int = 1) -> None:
        """by: a batch counts this many times, as with several pipelines in one iterator"""
        self._reader, self.batch_size, self._by = reader, batch_size, by
        self._size, self._resume_size, self._counter = size, resume_size, 0
        if resume_size >= 0:
            self._orig_size, self._size = size, resume_size
        assert self._size != 0, "Size cannot be 0"

    def __iter__(self) -> PatchedIterator:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        if self._counter >= self._size:
            raise StopIteration
        numbers = torch.tensor(self._reader.read(self.batch_size))
        self._counter += self.batch_size * self._by
        return [{"data": numbers[:, None].float().expand(-1, 6), "label": numbers[:, None]}]

    def reset(self) -> None:
        if self._counter >= self._size:
            self._counter = 0
            self._size = getattr(self, "_orig_size", self._size)
