"""A checkpoint as one file for stock safetensors, written while it is read: no torch, a few blocks of memory.

Owns:    names in the file and what its metadata says.
Holds:   every tensor is in the file with the bytes of the checkpoint; tied ones once, the other names noted in the
         metadata as `safetensors.torch.save_model` does it; plain values are not in it, and the caller is told.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from stepwell.restore.whole import Whole
from stepwell.storage.format import dtypes, shard
from stepwell.storage.format.record import LeafEntry, Record
from stepwell.storage.store import files
from stepwell.tools.interchange.merged import part
from stepwell.tools.interchange.new_file import Written, new_file
from stepwell.tools.interchange.outline import METADATA, OutlineNode, outline
from stepwell.tools.interchange.reading import OnBytes, deliver_leaves, entries_of, own_notes


@dataclass(frozen=True)
class Names:
    """`kept`: leaf in the record -> name in the file; `tied`: other name of the same tensor -> name in the file."""

    kept: dict[str, str]
    tied: dict[str, str]


def choose_names(root: OutlineNode, only: str | None, separator: str = "/") -> Names:
    """A name for every tensor: its path, without the tracked object's own name if only that one is exported."""
    kept: dict[str, str] = {}
    tied: dict[str, str] = {}
    taken = {"__metadata__"}
    for path, leaf in root.leaves():
        name = base = separator.join(path) or only or leaf
        number = 1
        while name in taken:  # the keys 1 and "1" of one dict
            number += 1
            name = f"{base}~{number}"
        taken.add(name)
        if leaf in kept:
            tied[name] = kept[leaf]
        else:
            kept[leaf] = name
    return Names(kept, tied)


def write_safetensors(
    whole: Whole, out: Path, *, only: str | None, force: bool, on_bytes: OnBytes | None = None
) -> Written:
    """Export a checkpoint, or one tracked object of it. Raises DamagedError and leaves no file if a byte is wrong."""
    root = outline(part(whole, only))
    names = choose_names(root, only)
    entries = entries_of(whole, set(names.kept))
    with new_file(out, force=force) as temporary:
        nbytes = fill_file(temporary, whole, names, entries, metadata_of(whole.record, only, names, entries), on_bytes)
    return Written(nbytes, len(entries), [*_notes(root, names, entries), *own_notes(whole, set(names.kept))])


def fill_file(
    path: Path,
    whole: Whole,
    names: Names,
    entries: list[LeafEntry],
    metadata: dict[str, str],
    on_bytes: OnBytes | None,
) -> int:
    """Write these leaves to a new file. Returns its size. It is not synced."""
    specs = [shard.LeafSpec(names.kept[entry.name], entry.dtype, entry.shape) for entry in entries]
    layout = shard.lay_out(specs, metadata)
    starts = {placed.spec.name: placed.start for placed in layout.placements}
    fd = files.create(path)
    try:
        files.preallocate(fd, layout.nbytes, path)
        files.write_at(fd, memoryview(layout.header), 0, path)
        os.ftruncate(fd, layout.nbytes)  # an empty last tensor ends the file where nothing is written

        def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
            files.write_at(fd, data, starts[names.kept[leaf.name]] + offset, path)

        deliver_leaves(whole, {entry.name for entry in entries}, deliver, on_bytes)
    finally:
        os.close(fd)
    return layout.nbytes


def metadata_of(record: Record, only: str | None, names: Names, entries: list[LeafEntry]) -> dict[str, str]:
    as_bytes = {
        names.kept[entry.name]: {"dtype": entry.dtype, "shape": list(entry.shape)}
        for entry in entries
        if entry.dtype not in dtypes.NATIVE
    }
    about = {
        "run": record.run,
        "step": record.id.step,
        "lineage": record.id.lineage,
        "only": only,
        "stored_as_bytes": as_bytes,
    }
    return {**names.tied, "stepwell": json.dumps(about)}


def _notes(root: OutlineNode, names: Names, entries: list[LeafEntry]) -> list[str]:
    notes = tensor_notes(names, entries)
    values = [path for path, node in root.walk() if node.kind == "value" and METADATA not in path]
    if values:
        notes.append(f"plain values are left out ({len(values)}); --format torch includes them")
    return notes


def tensor_notes(names: Names, entries: list[LeafEntry]) -> list[str]:
    """What safetensors cannot hold as it was."""
    notes = []
    if names.tied:
        some = ", ".join(f"{name} = {kept}" for name, kept in list(names.tied.items())[:3])
        notes.append(
            f"tied tensors are stored once ({some}); safetensors.torch.load_model ties them again, "
            "load_state_dict needs strict=False"
        )
    odd = sorted({entry.dtype for entry in entries if entry.dtype not in dtypes.NATIVE})
    if odd:
        notes.append(f"safetensors has no {', '.join(odd)}: stored as bytes, type and shape are in the metadata")
    return notes
