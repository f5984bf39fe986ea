"""One module of a checkpoint as a folder in the way of Hugging Face: safetensors files and an index of what is where.

Owns:    how tensors are dealt out to files, the names of these, and the index.
Holds:   every tensor is in one file, under the module's own name for it, tied ones once; a module that fits into one
         file has no index, as `save_pretrained` does it. No torch, a few blocks of memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError
from stepwell.restore.whole import Whole
from stepwell.storage.format.record import LeafEntry
from stepwell.tools.interchange.merged import part
from stepwell.tools.interchange.new_file import Written, check_folder, new_folder
from stepwell.tools.interchange.outline import outline
from stepwell.tools.interchange.reading import OnBytes, entries_of, own_notes
from stepwell.tools.interchange.safetensors_file import Names, choose_names, fill_file, metadata_of, tensor_notes

MODULE: Final = "model"
"""The tracked object that is meant where none is named."""
SHARD_BYTES: Final = 5_000_000_000
"""A file holds at most so many bytes of tensors, unless a single tensor is larger."""
INDEX: Final = "model.safetensors.index.json"


def write_hf(
    whole: Whole,
    out: Path,
    *,
    only: str | None,
    force: bool,
    on_bytes: OnBytes | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Export one tracked module. Raises DamagedError and leaves no folder if a byte is wrong."""
    check_folder(out, force=force)
    only = MODULE if only is None else only
    names = choose_names(outline(part(whole, only)), only, ".")
    found = {entry.name: entry for entry in entries_of(whole, set(names.kept))}
    entries = [found[leaf] for leaf in names.kept]  # in the order of the module
    if not entries:
        raise ConfigError(f"{only} contains no tensor; give --only another tracked object", found=only)
    shards = deal(entries, shard_bytes)
    files = [_file_name(number, len(shards)) for number in range(len(shards))]
    nbytes = 0
    with new_folder(out, force=force) as temporary:
        for file, shard in zip(files, shards, strict=True):
            here = _names_in(shard, names)
            metadata = metadata_of(whole.record, only, here, shard)
            nbytes += fill_file(temporary / file, whole, here, shard, metadata, on_bytes)
        if len(files) > 1:
            (temporary / INDEX).write_text(_index(files, shards, names))
    return Written(nbytes, len(entries), [*tensor_notes(names, entries), *own_notes(whole, set(names.kept))])


def deal(entries: list[LeafEntry], most: int) -> list[list[LeafEntry]]:
    """One file after the other, each as full as the order allows."""
    shards: list[list[LeafEntry]] = [[]]
    room = most
    for entry in entries:
        size = entry.end - entry.start
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(entry)
        room -= size
    return shards


def _file_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _names_in(shard: list[LeafEntry], names: Names) -> Names:
    kept = {entry.name: names.kept[entry.name] for entry in shard}
    here = set(kept.values())
    return Names(kept, {name: first for name, first in names.tied.items() if first in here})


def _index(files: list[str], shards: list[list[LeafEntry]], names: Names) -> str:
    total = sum(entry.end - entry.start for shard in shards for entry in shard)
    places = {names.kept[entry.name]: file for file, shard in zip(files, shards, strict=True) for entry in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True) + "\n"
