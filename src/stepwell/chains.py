"""Chains of lossy records as checkpoints: what each one reaches, and the state it makes of its base.

Owns:    finding them, and turning a base and its records into one image that is read like any other part.
Not:     writing them (agent.chain), replaying records (codecs.replay).
Holds:   every byte of the base is checked before a record is applied to it, and what comes out is the state the record
         says, or DamagedError; records after one that is not good are never used.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stepwell import journal
from stepwell.codecs.events import Lossy
from stepwell.codecs.listing import Listed, check_records, list_records
from stepwell.codecs.replay import Restored, read_document, restore
from stepwell.errors import DamagedError, StateError
from stepwell.format.checksum import BLOCK_BYTES, block_digest
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.restore.read import MemorySource, Source, read_record_leaves
from stepwell.restore.remote import open_file
from stepwell.restore.whole import Part
from stepwell.store import catalog, files
from stepwell.store.chains import chain_path, list_chains
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId

Image = np.ndarray[Any, np.dtype[np.uint8]]


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
        _, _, state = _replay(paths, base, None)
    except DamagedError as error:
        is_there = files.exists(paths.manifest(base)) and files.exists(chain_path(paths, base))
        return str(error) if is_there else None  # else a live run removed it while it was read
    return None if state.is_torn else state.stopped


def bring_back(paths: RunPaths, base: CheckpointId, until: int, least: int, log: journal.EventLog) -> Part:
    """The state after record `until`, or after the last good one before it, if that is of step `least` or later.

    Raises DamagedError, whatever is wrong: something else may be restored.
    """
    try:
        return _bring_back(paths, base, until, least, log)
    except (OSError, MemoryError, StateError, ValueError) as error:
        raise DamagedError(f"{chain_path(paths, base)}: {type(error).__name__}: {error}", path=str(base)) from error


def _bring_back(paths: RunPaths, base: CheckpointId, until: int, least: int, log: journal.EventLog) -> Part:
    path = chain_path(paths, base)
    record, image, state = _replay(paths, base, until)
    if not state.number or state.step < least:
        raise DamagedError(f"{path}: it ends at step {state.step}: {state.stopped}", path=str(path))
    for leaf in _live(record):
        value = state.leaves[leaf.name]
        if not np.may_share_memory(value, image):  # else it is the base's own
            image[leaf.start : leaf.end] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    facts = _facts(state.note, str(path))
    codec, stopped = _codec(path), state.stopped
    log.emit(Lossy(step=state.step, base=base.directory, records=state.number, codec=codec, stopped=stopped))
    id = CheckpointId(state.step, 0, base.lineage)
    return _part(paths, replace(record, id=id, created=facts["created"], tree=facts["tree"]), base, image)


def _replay(paths: RunPaths, base: CheckpointId, until: int | None) -> tuple[Record, Image, Restored]:
    path = chain_path(paths, base)
    manifest = catalog.read_manifest(paths, base)
    if manifest.world_size != 1:
        raise DamagedError(f"{path}: the base is of {manifest.world_size} ranks", path=str(path))
    record = catalog.read_record(paths, manifest)
    image = _read_base(paths, record)
    return record, image, restore(path, base={leaf.name: _values(image, leaf) for leaf in _live(record)}, until=until)


def _live(record: Record) -> list[LeafEntry]:
    """Leaves that may change."""
    return [leaf for leaf in record.leaves if leaf.file == 0]


def _read_base(paths: RunPaths, record: Record) -> Image:
    """The base's file of live leaves, with all its bytes checked."""
    directory, file = paths.checkpoint(record.id), record.files[0]
    image = np.empty(file.nbytes, np.uint8)
    start = min((leaf.start for leaf in _live(record)), default=file.nbytes)
    shard = directory / file.name
    assert isinstance(shard, Path)
    with open(files.open_regular(shard), "rb") as raw:
        image[:start] = np.frombuffer(raw.read(start), np.uint8)  # its header; checked with the blocks, and by `load`

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        if leaf.file == 0:
            image[leaf.start + offset : leaf.start + offset + len(data)] = np.frombuffer(data, np.uint8)

    read_record_leaves(record, lambda entry: open_file(directory / entry.name), None, deliver)
    return image


def _values(image: Image, leaf: LeafEntry) -> np.ndarray[Any, Any]:
    part = image[leaf.start : leaf.end]
    return part.view(np.float32) if leaf.dtype == "float32" else part


def _part(paths: RunPaths, record: Record, base: CheckpointId, image: Image) -> Part:
    """An image in memory, as if it had been written."""
    blocks = tuple(block_digest(image[start : start + BLOCK_BYTES].data) for start in range(0, image.size, BLOCK_BYTES))
    live = FileEntry(record.files[0].name, "safetensors", image.size, BLOCK_BYTES, blocks)
    kept = [file for file in record.files[1:] if file.kind != "opaque"]
    fd = os.memfd_create("stepwell-chain", os.MFD_CLOEXEC)
    memory = _Memory(fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(image.data)

    def open_source(file: FileEntry) -> Source:
        if file is live:
            return MemorySource(memory.fd, 0, file.nbytes, file.name)
        return open_file(paths.checkpoint(base) / file.name)

    return Part(replace(record, files=(live, *kept), suspect=None), open_source)


class _Memory:
    """Closes a descriptor when the last part that reads it is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)
