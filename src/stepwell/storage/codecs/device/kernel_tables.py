"""What kernels are given and what they give back: where things are, and the host's side of the results.

Owns:    the tensors around a launch.   Before: `tiles` cut the part up.   After: `device` launches.
Holds:   all of it is allocated once; symbols and results are copied to page-locked memory, and the host waits only for
         how many symbols there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from stepwell.storage.chain.section_coder import sample_stride
from stepwell.storage.codecs.assignment import CodedPart
from stepwell.storage.codecs.device import kernels
from stepwell.storage.codecs.device.thinning import Thinner
from stepwell.storage.codecs.device.tiles import lay_out
from stepwell.storage.codecs.floats import MANTISSA_BITS, MOST_EXPONENT, AnyArray, Bytes, Words
from stepwell.storage.codecs.quantise import Outcome
from stepwell.storage.codecs.signature import COLUMNS
from stepwell.storage.codecs.sparse import LEAST_NBYTES, Sparse

UNCODABLE: Final = (MOST_EXPONENT + 1) << MANTISSA_BITS
"""Bits of the smallest difference that is not coded."""
_INFINITE: Final = 255 << MANTISSA_BITS


class TablePlaces:
    """Where leaves and their symbols of so many bits are, and room for the symbols on both sides."""

    def __init__(self, part: CodedPart, bits: int, device: torch.device) -> None:
        self.tiles, self.bits, self._device = lay_out(part, bits, kernels.WIDTH, kernels.TILE_ROWS), bits, device
        self.count = len(self.tiles.table)
        self.table = up(self.tiles.table, device)
        self.powers = up(self.tiles.powers.view(np.int32), device)
        nbytes = self.tiles.groups[-1][1].stop if self.tiles.groups else 0
        self.packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._thinner = Thinner(self.packed) if nbytes > LEAST_NBYTES else None
        self._own: torch.Tensor | None = None
        self._addresses: list[int] = []
        self.leaves, self.align = torch.empty(0), 1

    def point_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors seldom move: their addresses are uploaded when they do."""
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            leaves, self.align = self.tiles.with_addresses(addresses)
            self.leaves, self._addresses = up(leaves, self._device), addresses

    def download(self, spans: Sequence[slice], room: torch.Tensor | None, *, is_thinned: bool) -> list[Bytes] | Sparse:
        """Queue the copy of the symbols in these places, to `room` or to memory of our own, where they will be until
        the next record. is_thinned: as marks and values, if that is less.
        """
        if room is None:
            room = self._own = host_like(self.packed) if self._own is None else self._own
        line: Bytes = room.numpy()
        found = self._thinner.thin(spans) if is_thinned and self._thinner is not None else None
        if not spans:
            return []
        if found is None:
            room.copy_(self.packed, non_blocking=True)
            return [line[span] for span in spans]
        nbytes, marks, values = found
        start, end = marks.numel(), marks.numel() + values.numel()
        room[:start].copy_(marks, non_blocking=True)
        room[start:end].copy_(values, non_blocking=True)
        return Sparse(nbytes, line[:start], line[start:end])


class Results:
    """What came of a record: outcomes of the groups, the signature, and the error by a sample. One piece of memory, so
    that it is cleared and copied at once.
    """

    def __init__(self, groups: int, samples: int, device: torch.device) -> None:
        sizes = (kernels.STATS * groups, 1, COLUMNS // 2, 2 * -(-samples // kernels.WIDTH))
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._host = host_like(self._all)
        self.stats, trouble, sums, error = self._all.split(sizes)
        self.trouble, self.sums = trouble.view(torch.int32), sums.view(torch.int32)
        self.error = error.view(torch.float64)
        self._stats_host, _, self._sums_host, self._error_host = self._host.split(sizes)

    def clear(self) -> None:
        """Before the kernels add to it."""
        self._all.zero_()

    def download(self) -> None:
        """Queue the copy."""
        self._host.copy_(self._all, non_blocking=True)

    def outcomes(self) -> list[Outcome]:
        """Of the groups, once they are copied; of those that were not coded they say nothing."""
        found = []
        for kept, largest, worst in self._stats_host.view(-1, kernels.STATS).tolist():
            is_sound = largest < UNCODABLE and worst < _INFINITE
            size = float(np.uint32(largest).view(np.float32))
            found.append(Outcome(kept, True, size) if is_sound else Outcome(is_sound=False))
        return found

    def signature(self) -> Words:
        """Of the part's new state, once it is copied."""
        found: Words = self._sums_host.numpy().view(np.uint32)
        return found

    def missing_and_way(self) -> tuple[float, float]:
        """As `Given` has them, once they are copied."""
        missing, way = self._error_host.view(torch.float64).view(-1, 2).numpy().sum(0).tolist()
        return missing, way


class Sample:
    """Entries that the error is taken of, as `coder` does on the host."""

    def __init__(self, part: CodedPart, device: torch.device) -> None:
        stride = sample_stride(part.size)
        lines = [np.arange(0, slot.leaf.count, stride, dtype=np.int64) for slot in part.slots]
        owners = np.repeat(np.arange(len(lines), dtype=np.int64), [line.size for line in lines])
        inner = np.concatenate([np.empty(0, np.int64), *lines])
        starts = np.array([slot.start for slot in part.slots], np.int64)
        self._owners, self._inner, self._places = (up(line, device) for line in (owners, inner, inner + starts[owners]))
        self._base = torch.empty(inner.size, dtype=torch.float32, device=device)
        self.count = inner.size

    def take_base(self, reference: torch.Tensor) -> None:
        """The reference holds the base."""
        self._base.copy_(reference[self._places])

    def measure(self, leaves: torch.Tensor, reference: torch.Tensor, error: torch.Tensor) -> None:
        """Sums of squares of what the reference lacks, and of the way from the base, of some samples each."""
        if self.count:
            kernels.compare[(-(-self.count // kernels.WIDTH),)](
                leaves, self._owners, self._inner, self._places, self._base, reference, error, self.count,
                WIDTH=kernels.WIDTH, **kernels.BUILD,
            )  # fmt: skip


def up(line: AnyArray, device: torch.device) -> torch.Tensor:
    """A small table on the device; the host waits until it is there."""
    return torch.from_numpy(line).to(device)


def host_like(line: torch.Tensor) -> torch.Tensor:
    """Room for a copy; page-locked, if it is of a device's memory."""
    return torch.empty_like(line, device="cpu", pin_memory=line.device.type == "cuda")
