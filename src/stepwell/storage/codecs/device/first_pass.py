"""The first pass on the device: which groups have something to code, and tables of those that do.

Owns:    counts and ranges on the device, and what `kernels.encode` is told to do with each group.
Before:  `device` knows which groups want a table.   After: `device` runs the second pass.
Holds:   tables are made by the same functions as those of the host. The device waits for the host once, for a few
         numbers of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from stepwell.storage.codecs.assignment import CodedPart
from stepwell.storage.codecs.codec_spec import LC, Spec
from stepwell.storage.codecs.coding_groups import AGAIN, EXACT, FRESH, SAME
from stepwell.storage.codecs.device import kernels
from stepwell.storage.codecs.device.kernel_tables import host_like
from stepwell.storage.codecs.floats import MOST_EXPONENT, from_bf16
from stepwell.storage.codecs.tables import Counts, Tables, bucket_tables, step_tables, wanted_ranges

_EXPONENTS: Final = 256
_MOST_COPIES: Final = 16
_WORTH_COPIES: Final = 256
"""With so many groups one copy of the counts is enough: programs seldom meet at one."""
_MODES: Final = {SAME: kernels.NOTHING, EXACT: kernels.VALUES, FRESH: kernels.SYMBOLS}


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Choices:
    """kinds: of all groups. Tables are those of the fresh ones, in their order."""

    kinds: NDArray[np.int32]
    tables: Tables | None = None


class Rules:
    """What is done with each group. Constructing makes room on the device."""

    def __init__(self, part: CodedPart, device: torch.device) -> None:
        self._groups = len(part.groups())
        sizes = [sum(slot.leaf.count for slot in slots) for slots in part.groups()]
        self._entries: Counts = np.array(sizes, np.int64)
        self.rows = torch.zeros((self._groups, kernels.RULE_FIELDS), dtype=torch.int32, device=device)
        self.words = torch.zeros((self._groups, 2 * _EXPONENTS), dtype=torch.int32, device=device)
        self._wanted = torch.zeros(self._groups, dtype=torch.int32, device=device)
        self._copies = max(1, min(_MOST_COPIES, _WORTH_COPIES // max(1, self._groups)))
        counts, picks = 2 * _EXPONENTS * self._groups * self._copies, 3 * kernels.PICKS * self._groups
        self._room = torch.zeros(2 * counts + picks // 2, dtype=torch.int64, device=device)
        self._counts, words = self._room[:counts], self._room[counts:].view(torch.int32)
        self._ranges, self._picks = words[: 2 * counts], words[2 * counts :]
        self._by_exponent = self._counts[: _EXPONENTS * self._groups]
        self._rows_host, self._wanted_host = host_like(self.rows), host_like(self._wanted).zero_()
        self._picks_host, self._counts_host = host_like(self._picks), host_like(self._by_exponent)

    def make(self, spec: Spec, is_wanted: Flags, launch: Callable[..., None], wait: Callable[[], None]) -> Choices:
        """Rules for the wanted groups; the others keep theirs. `wait` blocks the host until all that is queued is done.

        The kernels that read the rules are queued after this.
        """
        self._want(is_wanted)
        self._room.zero_()
        most = wanted_ranges(spec)
        launch(
            kernels.count, self._wanted, counts=self._counts, ranges=self._ranges, groups=self._groups,
            copies=self._copies, MOST=most, **(kernels.COUNT_TOP if most else kernels.COUNT_ALL),
        )  # fmt: skip
        if most:
            found = (self._counts, self._ranges, self._picks, self._groups, self._copies)
            _each(kernels.pick, self._groups, *found, MOST=most)
            self._picks_host.copy_(self._picks, non_blocking=True)
        else:
            self._counts_host.copy_(self._by_exponent, non_blocking=True)
        wait()
        kinds, tables = self._decide(spec, is_wanted)
        rows = self._rows_host.numpy()
        rows[is_wanted, 0] = np.array([_MODES.get(kind, 0) for kind in range(4)], np.int32)[kinds[is_wanted]]
        if tables is not None:
            _fill(rows, np.flatnonzero(kinds == FRESH), tables)
        self.rows.copy_(self._rows_host, non_blocking=True)
        if most:
            _each(kernels.spread, self._groups, self.rows, self.words)
        return Choices(kinds, tables)

    def _want(self, is_wanted: Flags) -> None:
        flags = self._wanted_host.numpy()
        if (flags != is_wanted).any():
            flags[:] = is_wanted
            self._wanted.copy_(self._wanted_host, non_blocking=True)

    def _decide(self, spec: Spec, is_wanted: Flags) -> tuple[NDArray[np.int32], Tables | None]:
        if isinstance(spec, LC):
            picks = self._picks_host.numpy().reshape(self._groups, 3, kernels.PICKS)
            kinds = _kinds(is_wanted, picks[:, 0, -1] > 0, picks[:, 0, 0] > 0)
            keys, lo, hi = (picks[kinds == FRESH, field, : wanted_ranges(spec)] for field in range(3))
            return kinds, bucket_tables(spec, keys, lo.view(np.uint32), hi.view(np.uint32)) if len(keys) else None
        counts = self._counts_host.numpy().reshape(self._groups, _EXPONENTS)
        exponents = np.flatnonzero(counts.max(0)[1:]) + 1
        counts = np.ascontiguousarray(counts[:, exponents].T)
        kinds = _kinds(is_wanted, counts[exponents > MOST_EXPONENT].sum(0) > 0, counts.sum(0) > 0)
        is_fresh, is_sound = kinds == FRESH, exponents <= MOST_EXPONENT
        counts = counts[is_sound][:, is_fresh]
        tables = step_tables(spec, exponents[is_sound], counts, self._entries[is_fresh]) if counts.size else None
        return kinds, tables


def _kinds(is_wanted: Flags, is_bad: Flags, is_full: Flags) -> NDArray[np.int32]:
    found = np.where(is_bad, EXACT, np.where(is_full, FRESH, SAME))
    return np.where(is_wanted, found, AGAIN).astype(np.int32)


def _fill(rows: NDArray[np.int32], fresh: NDArray[np.int64], tables: Tables) -> None:
    if tables.keys is not None:
        buckets = np.zeros((fresh.size, kernels.RULE_FIELDS - kernels.BUCKETS_AT), np.uint32)
        found = tables.keys.astype(np.uint32) | tables.heads.astype(np.uint32) << np.uint32(16)
        buckets[:, : found.shape[1]] = np.where(tables.keys > 0, found, np.uint32(0))
        rows[fresh, kernels.BUCKETS_AT :] = buckets.view(np.int32)
        return
    amounts = from_bf16(tables.heads[:, 0])
    scales = np.float32(1) / amounts if tables.thresholds is None else tables.thresholds
    rows[fresh, 1], rows[fresh, 2] = scales.view(np.int32), amounts.view(np.int32)


def _each(kernel: Any, groups: int, *arguments: Any, **options: int) -> None:
    """A program for each group."""
    kernel[(groups,)](*arguments, **options, **kernels.BUILD)
