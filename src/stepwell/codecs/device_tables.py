"""What kernels are given and what they give back: tables on the device, and the host's side of the results.

Owns:    the tensors around a launch.   Before: `tiles` cut the part up.   After: `device` launches.
Holds:   all of it is allocated once; symbols and results are copied to page-locked memory, without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from stepwell.codecs import kernels
from stepwell.codecs.coder import sample_stride
from stepwell.codecs.floats import MANTISSA_BITS, MOST_EXPONENT, AnyArray, Bytes, Words
from stepwell.codecs.groups import AGAIN, EXACT, FRESH, SAME, Kept
from stepwell.codecs.layout import Part
from stepwell.codecs.quantise import Outcome
from stepwell.codecs.signature import COLUMNS
from stepwell.codecs.tables import BucketTable, SignTable, StepTable, Table
from stepwell.codecs.tiles import lay_out

UNCODABLE: Final = (MOST_EXPONENT + 1) << MANTISSA_BITS
"""Bits of the smallest difference that is not coded."""
_INFINITE: Final = 255 << MANTISSA_BITS


@dataclass
class Choice:
    """How a group is coded: its kind, and its table if it has one."""

    kind: int
    kept: Kept | None = None

    @property
    def mode(self) -> int:
        return {SAME: kernels.NOTHING, EXACT: kernels.VALUES}.get(self.kind, kernels.SYMBOLS)


class Places:
    """Where leaves and their symbols of so many bits are, and room for the symbols on both sides."""

    def __init__(self, part: Part, bits: int, device: torch.device) -> None:
        self.tiles, self.bits, self._device = lay_out(part, bits, kernels.WIDTH, kernels.TILE_ROWS), bits, device
        self.grid = (len(self.tiles.table),)
        self.table = up(self.tiles.table, device)
        self.powers = up(self.tiles.powers.view(np.int32), device)
        nbytes = self.tiles.groups[-1][1].stop if self.tiles.groups else 0
        self.packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._own: torch.Tensor | None = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._addresses: list[int] = []
        self.leaves, self.align = torch.empty(0), 1

    def point_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors seldom move: their addresses are uploaded when they do."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            leaves, self.align = self.tiles.with_addresses(addresses)
            self.leaves, self._addresses = up(leaves, self._device), addresses

    def download(self, room: torch.Tensor | None) -> None:
        """Queue the copy of the symbols, to `room` or to memory of our own."""
        if room is None:
            room = self._own = _host_like(self.packed) if self._own is None else self._own
        self._host = room
        room.copy_(self.packed, non_blocking=True)

    def packed_bytes(self) -> Bytes:
        """The symbols, once they are copied; until the next record."""
        found: Bytes = self._host.numpy()
        return found


class Uploaded:
    """Tables of all groups as kernels want them."""

    def __init__(self, choices: Sequence[Choice], bits: int, device: torch.device) -> None:
        values = np.zeros((len(choices), 1 << bits), np.float32)
        keys = np.full((len(choices), kernels.MOST_SYMBOLS), -1, np.int32)
        scales = np.zeros(len(choices), np.float32)
        for number, choice in enumerate(choices):
            if choice.kept is not None and choice.kind in (FRESH, AGAIN):
                table = choice.kept.table
                known = table.values[: 1 << bits]
                values[number, : known.size] = known
                scales[number] = _scale(table)
                if isinstance(table, BucketTable):
                    keys[number, : len(table.keys)] = table.keys
        modes = np.array([choice.mode for choice in choices], np.int32)
        self.modes, self.values, self.keys, self.scales = (up(line, device) for line in (modes, values, keys, scales))


def _scale(table: Table) -> float:
    if isinstance(table, StepTable):
        return float(table.per_step)
    return float(table.threshold) if isinstance(table, SignTable) else 0.0


class Results:
    """What came of a record: outcomes of the groups, the signature, and the error by a sample."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.stats = torch.zeros(kernels.STATS * groups, dtype=torch.int64, device=device)
        self.sums = torch.zeros(COLUMNS, dtype=torch.int32, device=device)
        self.error = torch.zeros(2, dtype=torch.float64, device=device)
        self._host = [_host_like(line) for line in (self.stats, self.sums, self.error)]

    def clear(self) -> None:
        """Before the kernels add to it."""
        self.stats.zero_()
        self.sums.zero_()

    def download(self) -> None:
        """Queue the copies."""
        for here, line in zip(self._host, (self.stats, self.sums, self.error), strict=True):
            here.copy_(line, non_blocking=True)

    def outcomes(self) -> list[Outcome]:
        """Of the groups, once they are copied; of those that were not coded they say nothing."""
        found = []
        for kept, largest, worst in self._host[0].view(-1, kernels.STATS).tolist():
            is_sound = largest < UNCODABLE and worst < _INFINITE
            size = float(np.uint32(largest).view(np.float32))
            found.append(Outcome(kept, True, size) if is_sound else Outcome(is_sound=False))
        return found

    def signature(self) -> Words:
        """Of the part's new state, once it is copied."""
        found: Words = self._host[1].numpy().view(np.uint32)
        return found

    def missing_and_way(self) -> tuple[float, float]:
        """As `Given` has them, once they are copied."""
        missing, way = self._host[2].tolist()
        return missing, way


class Sample:
    """Entries that the error is taken of, as `coder` does on the host."""

    def __init__(self, part: Part, device: torch.device) -> None:
        stride = sample_stride(part.size)
        lines = [np.arange(0, slot.leaf.count, stride, dtype=np.int64) for slot in part.slots]
        owners = np.repeat(np.arange(len(lines), dtype=np.int64), [line.size for line in lines])
        inner = np.concatenate([np.empty(0, np.int64), *lines])
        starts = np.array([slot.start for slot in part.slots], np.int64)
        self._owners, self._inner, self._places = (up(line, device) for line in (owners, inner, inner + starts[owners]))
        self._truth = torch.empty(inner.size, dtype=torch.float32, device=device)
        self._base = torch.empty(inner.size, dtype=torch.float64, device=device)

    def take_base(self, reference: torch.Tensor) -> None:
        """The reference holds the base."""
        self._base.copy_(reference[self._places])

    def measure(self, leaves: torch.Tensor, reference: torch.Tensor, error: torch.Tensor) -> None:
        """Sums of squares of what the reference lacks, and of the way from the base."""
        count = self._truth.numel()
        if count:
            grid = (-(-count // kernels.WIDTH),)
            kernels.gather[grid](leaves, self._owners, self._inner, self._truth, count, WIDTH=kernels.WIDTH)
        truth = self._truth.double()
        error[0] = (truth - reference[self._places].double()).square().sum()
        error[1] = (truth - self._base).square().sum()


def up(line: AnyArray, device: torch.device) -> torch.Tensor:
    """A small table on the device; the host waits until it is there."""
    return torch.from_numpy(line).to(device)


def _host_like(line: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(line, device="cpu", pin_memory=line.device.type == "cuda")
