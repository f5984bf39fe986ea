"""Chains of lossy records as checkpoints: what each one reaches, and the state it makes of its base.

Owns:    finding them, and turning a base and its records into one image that is read like any other part.
Not:     writing them (agent.chain), replaying records (codecs.replay).
Holds:   every byte of the base is checked before a record is applied to it, and what comes out is the state the record
         says, or DamagedError; records after one that is not good are never used.
"""

from __future__ import annotations

import bisect
import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from stepwell.errors import DamagedError, StateError
from stepwell.events import journal
from stepwell.events.chain_events import Lossy
from stepwell.restore.byte_sources import MEMORY_THREADS, BlockSource
from stepwell.restore.from_disk import open_file
from stepwell.restore.verified_read import read_record_leaves
from stepwell.restore.whole import Part
from stepwell.storage.chain.apply_threads import Crew, all_threads
from stepwell.storage.chain.chain_files import chain_path, list_chains
from stepwell.storage.chain.chain_listing import Listed, check_records, list_records
from stepwell.storage.chain.replay import Restored, read_document, restore
from stepwell.storage.codecs.assignment import as_bytes
from stepwell.storage.codecs.floats import AnyArray, Bytes
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.storage.store import catalog, files
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_DIGEST_BYTES: Final = 64 << 20
"""Of memory for blocks whose checksums are taken."""


@dataclass(frozen=True)
class Chain:
    """The records against a base whose bytes are whole."""

    base: CheckpointId
    codec: str
    records: list[Listed]

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return sum(item.nbytes for item in self.records)


def find_chains(paths: RunPaths) -> list[Chain]:
    """Chains whose base is committed, the newest first. One that cannot be read is as if it were not there."""
    found = []
    for base, path in list_chains(paths):
        with contextlib.suppress(OSError, DamagedError):
            catalog.read_manifest(paths, base)
            found.append(Chain(base, _codec(path), list_records(path)))
    return found


def _codec(path: Path) -> str:
    """The one that makes it lossy."""
    specs = [part.spec.text for part in read_document(path).parts if not part.spec.is_exact]
    return specs[0] if specs else "exact codecs"


def when(item: Listed) -> float:
    """The time of a record's snapshot. Raises DamagedError."""
    return float(_facts(item.note(), f"record {item.number}")["created"])


def _facts(note: bytes, path: str) -> dict[str, Any]:
    """What the agent noted with a record. Raises DamagedError."""
    try:
        facts = json.loads(note)
        if isinstance(facts, dict) and isinstance(facts["created"], int | float) and isinstance(facts["tree"], dict):
            return facts
    except (ValueError, KeyError, RecursionError):
        pass
    raise DamagedError(f"{path}: a record's note is none of ours", path=path)


def why_broken(paths: RunPaths, base: CheckpointId) -> str | None:
    """What is wrong with a chain, every record of it applied. A last one that a crash cut off is not."""
    try:
        check_records(chain_path(paths, base))  # a restore does not read what is before a skip record
        _, state = _replay(paths, base, None)
    except DamagedError as error:
        is_there = files.exists(paths.manifest(base)) and files.exists(chain_path(paths, base))
        return str(error) if is_there else None  # else a live run removed it while it was read
    except (OSError, MemoryError, RuntimeError, StateError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if state.is_torn else state.stopped


def bring_back(paths: RunPaths, base: CheckpointId, until: int, least: int, log: journal.EventLog) -> Part:
    """The state after record `until`, or after the last good one before it, if that is of step `least` or later.

    Raises DamagedError, whatever is wrong: something else may be restored.
    """
    try:
        return _bring_back(paths, base, until, least, log)
    except (OSError, MemoryError, RuntimeError, StateError, ValueError) as error:  # RuntimeError: no more threads
        raise DamagedError(f"{chain_path(paths, base)}: {type(error).__name__}: {error}", path=str(base)) from error


def _bring_back(paths: RunPaths, base: CheckpointId, until: int, least: int, log: journal.EventLog) -> Part:
    path = chain_path(paths, base)
    record, state = _replay(paths, base, until)
    if not state.number or state.step < least:
        raise DamagedError(f"{path}: it ends at step {state.step}: {state.stopped}", path=str(path))
    facts = _facts(state.note, str(path))
    codec, stopped = _codec(path), state.stopped
    log.emit(Lossy(step=state.step, base=base.directory, records=state.number, codec=codec, stopped=stopped))
    id = CheckpointId(state.step, 0, base.lineage)
    made = replace(record, id=id, created=facts["created"], tree=facts["tree"])
    return _part(paths, made, base, RestoredImage(record, _read_header(paths, record), state.leaves), _held(path))


def _held(path: Path) -> set[str]:
    """Leaves that no record changes."""
    return {slot.leaf.name for part in read_document(path).parts if part.is_held for slot in part.slots}


def _replay(paths: RunPaths, base: CheckpointId, until: int | None) -> tuple[Record, Restored]:
    path = chain_path(paths, base)
    manifest = catalog.read_manifest(paths, base)
    if manifest.world_size != 1:
        raise DamagedError(f"{path}: the base is of {manifest.world_size} ranks", path=str(path))
    record = catalog.read_record(paths, manifest)
    sizes = {slot.leaf.name: slot.leaf.nbytes for part in read_document(path).parts for slot in part.slots}
    if sizes != {leaf.name: leaf.end - leaf.start for leaf in _live(record)}:  # before anything is allocated for them
        raise DamagedError(f"{path}: the chain is of other leaves than its base", path=str(path))
    return record, restore(path, base=lambda leaves: _read_base(paths, record, leaves), until=until)


def _live(record: Record) -> list[LeafEntry]:
    """Leaves that may change."""
    return [leaf for leaf in record.leaves if leaf.file == 0]


def _read_base(paths: RunPaths, record: Record, leaves: dict[str, AnyArray]) -> None:
    """The base's live leaves, with all bytes of its files checked, straight to where records are applied to them."""
    directory = paths.checkpoint(record.id)
    rooms = {name: as_bytes(value.reshape(-1)) for name, value in leaves.items()}

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        if leaf.file == 0:
            rooms[leaf.name][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    read_record_leaves(record, lambda entry: open_file(directory / entry.name), None, deliver)


def _read_header(paths: RunPaths, record: Record) -> Bytes:
    """What the base's file of live leaves begins with; `load` checks it."""
    file = record.files[0]
    shard = paths.checkpoint(record.id) / file.name
    assert isinstance(shard, Path)
    nbytes = min((leaf.start for leaf in _live(record)), default=file.nbytes)
    with open(files.open_regular(shard), "rb") as raw:
        return np.frombuffer(raw.read(nbytes), np.uint8)


class RestoredImage:
    """The file of live leaves as it would be with these values: a source that is read like any other."""

    label = "chain"

    def __init__(self, record: Record, header: Bytes, leaves: dict[str, AnyArray]) -> None:
        lines = [(leaf.start, as_bytes(leaves[leaf.name].reshape(-1))) for leaf in _live(record)]
        self._lines = [(0, header), *sorted((line for line in lines if line[1].size), key=lambda line: line[0])]
        self._starts = [start for start, _ in self._lines]

    @property
    def threads(self) -> int:
        return min(MEMORY_THREADS, all_threads())

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        """See `BlockSource`: the leaves follow each other without gaps."""
        room, done, number = np.frombuffer(buffer, np.uint8), 0, bisect.bisect_right(self._starts, start) - 1
        while done < nbytes:
            if number == len(self._lines):
                raise DamagedError(f"{self.label}: ends at {start + done}", path=self.label, found=start + done)
            first, line = self._lines[number]
            piece = line[start + done - first : start + nbytes - first]
            room[done : done + piece.size] = piece
            done, number = done + piece.size, number + 1
        return buffer[:nbytes]

    def close(self) -> None:
        """The leaves stay: it may be opened again."""


def _part(paths: RunPaths, record: Record, base: CheckpointId, image: RestoredImage, held: set[str]) -> Part:
    """An image in memory, as if it had been written."""
    old = record.files[0]
    changed = {
        number
        for leaf in _live(record)
        if leaf.name not in held and leaf.end > leaf.start
        for number in range(leaf.start // old.block_bytes, (leaf.end - 1) // old.block_bytes + 1)
    }

    def digest(number: int) -> str:
        start = number * old.block_bytes
        nbytes = min(old.block_bytes, old.nbytes - start)
        return block_digest(image.read(start, nbytes, np.empty(nbytes, np.uint8).data))

    rooms = max(1, _DIGEST_BYTES // old.block_bytes)  # whatever the record says of its blocks
    with Crew(min(all_threads(), rooms, max(1, len(changed)))) as crew:
        fresh = dict(zip(changed, crew.each(digest, changed), strict=True))
    live = replace(old, blocks=tuple(fresh.get(number, known) for number, known in enumerate(old.blocks)))
    kept = [file for file in record.files[1:] if file.kind != "opaque"]

    def open_source(file: FileEntry) -> BlockSource:
        return image if file is live else open_file(paths.checkpoint(base) / file.name)

    return Part(replace(record, files=(live, *kept), suspect=None), open_source)
