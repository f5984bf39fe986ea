"""Whole tensors of a checkpoint on disk, of however many ranks, every byte checked on the way.

Owns:    putting the boxes of all ranks together, as bytes; which blocks are touched for what is wanted.
Not:     which part of which file holds what (restore.whole), where the bytes go (`deliver`).
Holds:   memory is a few blocks: `deliver_leaves` passes them on in the order of the files, `Tensors` keeps one of each
         file. Leaves that are each rank's own are those of the rank that `Whole` looks at.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepwell.errors import DamagedError, RestoreError, listing
from stepwell.restore.byte_sources import BlockSource
from stepwell.restore.preference import choose_on_disk
from stepwell.restore.verified_read import Deliver, read_file, read_some
from stepwell.restore.whole import Part, Whole, parts_on_disk, whole_leaf
from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box, Runs
from stepwell.storage.format.record import LeafEntry
from stepwell.storage.store import files
from stepwell.storage.store.paths import RunPaths

_MOST_NAMED: Final = 3
OnBytes = Callable[[int], None]
"""Told of every piece delivered, for a progress bar. From several threads at once."""


def is_run(where: str | os.PathLike[str]) -> bool:
    """Whether a run is in this directory or bucket."""
    return files.exists(RunPaths.at(where).run)


def open_checkpoint(where: str | os.PathLike[str], step: int | None, rank: int = 0, world_size: int = 1) -> Whole:
    """The checkpoint of a run that a restart would use, or that of a step. Raises RestoreError if there is none.

    rank, world_size:  who asks: where as many ranks saved it, each gets its own values and leaves back
    """
    paths, problems = RunPaths.at(where), []
    for choice in choose_on_disk(paths, step=step):
        manifest = choice.entry.manifest
        if choice.rank is None or manifest is None:
            problems.append(f"{choice.entry.id}: {choice.reason}")
            continue
        try:
            return Whole(parts_on_disk(paths, manifest), rank if manifest.world_size == world_size else 0)
        except DamagedError as error:
            problems.append(f"{choice.entry.id}: {error}")
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise RestoreError(f"{where} has no readable {wanted}\n{listing(problems)}".rstrip(), path=os.fspath(where))


def entries_of(whole: Whole, wanted: set[str]) -> list[LeafEntry]:
    """These leaves as whole tensors, in the order of the records. One that no record has is damage."""
    missing = wanted - whole.leaves.keys()
    if missing:
        raise DamagedError(f"{whole.record.id}: the record lacks leaf {min(missing)!r}", leaf=min(missing))
    return [whole_leaf(entry) for name, entry in whole.leaves.items() if name in wanted]


def own_notes(whole: Whole, wanted: set[str]) -> list[str]:
    """What a person has to know of tensors of which each rank has another one."""
    own = sorted(name for name in wanted if whole.leaves[name].private)
    if not own or whole.is_single:
        return []
    some = ", ".join(own[:_MOST_NAMED]) + (" ..." if len(own) > _MOST_NAMED else "")
    rank = whole.record.owner.rank
    return [f"each rank has {len(own)} values of its own ({some}); the export contains those of rank {rank}"]


def deliver_leaves(whole: Whole, wanted: set[str], deliver: Deliver, on_bytes: OnBytes | None = None) -> None:
    """Hand on the wanted leaves, with offsets in their whole tensors. Raises DamagedError at the first bad block."""
    entries = {entry.name: entry for entry in entries_of(whole, wanted)}
    for part, fetches in whole.plan({name: Box.whole(entry.shape) for name, entry in entries.items()}):
        runs = {
            fetch.entry.name: Runs(fetch.needed, fetch.entry.shape, fetch.target, entries[fetch.entry.name].shape)
            for fetch in fetches
        }

        def spread(leaf: LeafEntry, offset: int, data: memoryview, runs: dict[str, Runs] = runs) -> None:
            size = dtypes.itemsize(leaf.dtype)
            length = runs[leaf.name].length * size
            end = offset + len(data)
            for number in range(offset // length, -(-end // length)):
                first = number * length
                low, high = max(offset, first), min(end, first + length)
                place = runs[leaf.name].starts(number)[1] * size + low - first
                deliver(entries[leaf.name], place, data[low - offset : high - offset])
            if on_bytes is not None:
                on_bytes(len(data))

        read_some(part.record, part.open_source, [fetch.entry for fetch in fetches], spread)


class Tensors:
    """Boxes of tensors on demand. Keeps the last block of each file open."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._blocks = {id(part): _Blocks(part) for part in whole.parts}

    def read(self, name: str, box: Box) -> bytearray:
        """The bytes of a box of a leaf. Raises DamagedError."""
        size = dtypes.itemsize(self._whole.leaves[name].dtype)
        found = bytearray(box.numel * size)
        for part, fetches in self._whole.plan({name: box}):
            for fetch in fetches:
                runs = Runs(fetch.needed, fetch.entry.shape, fetch.target, box.shape)
                nbytes = runs.length * size
                for source, target in runs:
                    with memoryview(found)[target * size : target * size + nbytes] as place:
                        self._blocks[id(part)].read(fetch.entry, source * size, place)
        return found

    def close(self) -> None:
        """Close the files."""
        for blocks in self._blocks.values():
            blocks.close()


class _Blocks:
    """Verified bytes of the leaves of one rank."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._sources: dict[int, BlockSource] = {}
        self._held: dict[int, tuple[int, bytearray]] = {}

    def read(self, leaf: LeafEntry, offset: int, place: memoryview) -> None:
        """Fill `place` with the bytes of a leaf from `offset` on."""
        block_bytes = self._part.record.files[leaf.file].block_bytes
        position, done = leaf.start + offset, 0
        while done < len(place):
            number, inside = divmod(position + done, block_bytes)
            with memoryview(self._block(leaf, number))[inside : inside + len(place) - done] as piece:
                place[done : done + len(piece)] = piece
                done += len(piece)

    def _block(self, leaf: LeafEntry, number: int) -> bytearray:
        held = self._held.get(leaf.file)
        if held is not None and held[0] == number:
            return held[1]
        file = self._part.record.files[leaf.file]
        if leaf.file not in self._sources:
            self._sources[leaf.file] = self._part.open_source(file)
        start = number * file.block_bytes
        end = min(start + file.block_bytes, file.nbytes)
        block = bytearray(end - start)

        def deliver(_: LeafEntry, offset: int, data: memoryview) -> None:
            block[offset : offset + len(data)] = data

        exactly = replace(leaf, start=start, end=end)  # a leaf that is this block
        read_file(self._sources[leaf.file], file, [exactly], deliver, check_all=False)
        self._held[leaf.file] = (number, block)
        return block

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
