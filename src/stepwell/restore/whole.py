"""A checkpoint of many ranks as one: which part of which file holds which part of a tensor.

Owns:    the index over the records that were looked into, and what has to be read for a box of a tensor.
Not:     reading (read), tensors (load), finding the records that hold a box (find).
Before:  `store.catalog` found the manifest.
Holds:   what is read for a box makes it up, each element once; only rows that are needed are read. A rank that comes
         back looks into its own record, and into others only for what that one lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepwell.errors import DamagedError
from stepwell.restore.byte_sources import BlockSource
from stepwell.restore.from_disk import open_file
from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box, is_covered
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.storage.store import catalog
from stepwell.storage.store.parallel_reads import for_each
from stepwell.storage.store.paths import RunPaths

_TRAINED: Final = ("parameter", "moment1", "moment2", "optimizer")
"""Roles of leaves that optimizers change. Others of a rank's own (statistics, generators) may be another rank's."""


class Part:
    """One rank's record, which may be read when it is first asked for, and the way to the bytes of its files."""

    def __init__(self, record: Record | Callable[[], Record], open_source: Callable[[FileEntry], BlockSource]) -> None:
        self._record = record
        self.open_source = open_source

    @property
    def record(self) -> Record:
        """Raises DamagedError if it cannot be read."""
        if not isinstance(self._record, Record):
            self._record = self._record()
        return self._record

    def with_source(self, open_source: Callable[[FileEntry], BlockSource]) -> Part:
        """The same record, and another way to the bytes."""
        return Part(self._record, open_source)


def parts_on_disk(paths: RunPaths, manifest: Manifest) -> list[Part]:
    """The parts of a checkpoint, whose records are read when they are asked for."""
    directory = paths.checkpoint(manifest.id)
    return [
        Part(
            functools.partial(catalog.read_record, paths, manifest, rank), lambda file: open_file(directory / file.name)
        )
        for rank in range(manifest.world_size)
    ]


@dataclass(frozen=True)
class Fetch:
    """Rows of one leaf to be read, and where what is needed of them goes.

    entry:   the rows, as if they were a leaf
    needed:  the part of these rows that is needed
    target:  where that lies in the box that was asked for
    """

    entry: LeafEntry
    needed: Box
    target: Box

    @property
    def is_whole(self) -> bool:
        """All of the rows are needed."""
        return self.needed.shape == self.entry.shape


class Whole:
    """The records of a checkpoint.

    mine:     whose values, and leaves of a rank's own, are looked at; None: those of rank 0, for other ranks than these
    is_lazy:  only that record is looked into at once, if it says of every leaf what it is. Records that an older
              version wrote do not
    """

    def __init__(self, parts: Sequence[Part], mine: int | None = 0, *, is_lazy: bool = False) -> None:
        self.parts = parts
        self._is_resized, self._mine = mine is None, mine or 0
        if not is_lazy:
            for_each(parts, lambda part: part.record)
        self.record = parts[self._mine].record
        self.leaves: dict[str, LeafEntry] = {}
        self._pieces: dict[str, list[tuple[int, LeafEntry]]] = {}
        self._known: set[int] = set()
        self._copies: dict[str, str] = {}
        elsewhere = self.record.elsewhere if is_lazy else None
        self.look_into([self._mine] if elsewhere is not None else range(len(parts)))
        for entry in elsewhere or ():
            self.leaves.setdefault(entry.name, entry)
            self._pieces.setdefault(entry.name, [])

    def look_into(self, numbers: Iterable[int]) -> None:
        """What these records hold counts too. Raises DamagedError."""
        new = sorted(set(numbers) - self._known)
        for_each([self.parts[number] for number in new], lambda part: part.record)
        for number in new:
            record = self.parts[number].record
            self._known.add(number)
            self._check_copies(record)
            for entry in record.leaves:
                if not entry.private or number == self._mine:
                    self._add(number, entry)

    def _check_copies(self, record: Record) -> None:
        """A snapshot in memory was looked at by nobody: its parts may be of tensors that are not the same any more."""
        for ranks, digest in record.copies.items():
            if self._copies.setdefault(ranks, digest) != digest:
                raise DamagedError(f"ranks {ranks} stored parts of tensors that were not the same on all of them")

    def _add(self, number: int, entry: LeafEntry) -> None:
        known = self.leaves.setdefault(entry.name, entry)
        if (known.dtype, known.global_shape, known.private) != (entry.dtype, entry.global_shape, entry.private):
            raise DamagedError(
                f"leaf {entry.name!r} is {known.dtype} {known.global_shape} in one record, {entry.dtype} "
                f"{entry.global_shape} in another",
                leaf=entry.name,
            )
        self._pieces.setdefault(entry.name, []).append((number, entry))

    @property
    def nbytes(self) -> int:
        """Size of all files of all ranks."""
        return sum(part.record.nbytes for part in self.parts)

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors, each counted once and whole."""
        return sum(entry.end - entry.start for entry in map(whole_leaf, self.leaves.values()))

    def bound_to_ranks(self) -> list[str]:
        """What only as many ranks can go on with: trained tensors under one name of which each rank has another."""
        count = len(self.parts)
        if not self._is_resized:
            return []
        return [
            f"{name}: each of the {count} ranks that saved it has its own; restart on {count} ranks"
            for name, entry in self.leaves.items()
            if entry.private and entry.role in _TRAINED
        ]

    @property
    def is_single(self) -> bool:
        """One rank wrote it all: every file is read whole, and its header checked."""
        return len(self.parts) == 1

    @property
    def frozen(self) -> set[str]:
        """Leaves that did not change, as far as the records tell that were looked into."""
        return {name for name, pieces in self._pieces.items() for _, entry in pieces if entry.file == 1}

    def lacking(self, wanted: Mapping[str, Box]) -> dict[str, Box]:
        """Boxes that the records do not make up which were looked into, nor those that share tensors with this one."""
        lacking = {name: box for name, box in wanted.items() if self._find(name, box) is None}
        if lacking and not self._known.issuperset(self.record.partners):
            self.look_into(self.record.partners)
            return self.lacking(lacking)
        return lacking

    def _find(self, name: str, box: Box) -> list[tuple[int, Fetch]] | None:
        """What makes up a box of a leaf; None if that is not known."""
        found = [(number, fetch) for number, entry in self._pieces[name] if (fetch := _fetch(entry, box))]
        return found if is_covered(Box.whole(box.shape), [fetch.target for _, fetch in found]) else None

    def plan(self, wanted: Mapping[str, Box]) -> Iterator[tuple[Part, list[Fetch]]]:
        """What to read for a box of each leaf, part by part. Raises DamagedError if something is in no record."""
        reads: dict[int, list[Fetch]] = {}
        found = {name: self._find(name, box) for name, box in wanted.items()}
        if self.lacking({name: wanted[name] for name, fetches in found.items() if fetches is None}):
            self.look_into(range(len(self.parts)))
        for name, box in wanted.items():
            fetches = self._find(name, box) if found[name] is None else found[name]
            if fetches is None:
                raise DamagedError(f"the records do not make up leaf {name!r}", leaf=name)
            for number, fetch in fetches:
                reads.setdefault(number, []).append(fetch)
        for number in sorted(reads):
            yield self.parts[number], reads[number]


def check_cover(whole: Whole) -> None:
    """Raise DamagedError for a tensor that the records of all ranks do not make up."""
    for _ in whole.plan({name: Box.whole(entry.global_shape) for name, entry in whole.leaves.items()}):
        pass


def whole_leaf(entry: LeafEntry) -> LeafEntry:
    """The whole tensor of which a leaf is a part, as if it were a leaf that lies alone in a file."""
    nbytes = dtypes.element_count(entry.global_shape) * dtypes.itemsize(entry.dtype)
    box = Box.whole(entry.global_shape)
    return replace(entry, shape=box.shape, offsets=box.offsets, start=0, end=nbytes)


def _fetch(entry: LeafEntry, wanted: Box) -> Fetch | None:
    """The rows of a leaf in which something of a box lies. None if there is nothing."""
    if not wanted.numel:
        return None
    met = entry.box.meet(wanted)
    if met is None:
        return None
    inner = met.inside(entry.box)
    first = inner.offsets[0] if inner.shape else 0
    rows = entry.box.rows(first, first + met.row_count)
    row_bytes = (entry.end - entry.start) // entry.box.row_count
    start = entry.start + first * row_bytes
    cut = replace(entry, shape=rows.shape, offsets=rows.offsets, start=start, end=start + met.row_count * row_bytes)
    return Fetch(cut, met.inside(rows), met.inside(wanted))
