"""Records of many ranks on a disk, each with its rows of as many leaves as a large model has; of shards the length."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.storage.store import assemble, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

ROWS, COLUMNS, START, BLOCK = 4, 64, 4096, 1 << 20
_ID = CheckpointId(5, 0, 1)


def record(run: str, rank: int, world: int, leaves: int) -> Record:
    """What a rank of FSDP2 says: some rows of each leaf, under names as long as real ones."""
    size, entries = ROWS * COLUMNS * 4, []
    for number in range(leaves):
        start = START + number * size
        what = {"role": "parameter", "device": "cuda:0", "global_shape": (world * ROWS, COLUMNS)}
        name = f"optimizer/state/{number}/exp_avg" if number % 3 else f"model/layers.{number}.attention.wq.weight"
        entries.append(
            LeafEntry(name, 0, "float32", (ROWS, COLUMNS), start, start + size, offsets=(rank * ROWS, 0), **what)
        )
    nbytes = START + leaves * size
    file = FileEntry(f"rank-{rank:05d}.safetensors", "safetensors", nbytes, BLOCK, ("0" * 16,) * -(-nbytes // BLOCK))
    tree = {"model": {leaf.name: {"$tensor": leaf.name} for leaf in entries}, "stepwell": {"step": _ID.step}}
    known: dict[str, Any] = {}
    if "elsewhere" in inspect.signature(Record).parameters:
        known = {"elsewhere": (), "partners": ()}
    return Record(run, _ID, Owner(rank, world), 1.0, (file,), tuple(entries), tree, **known)


def make(root: Path, world: int, leaves: int) -> tuple[RunPaths, CheckpointId]:
    """A run with one checkpoint of so many ranks that is not committed. Its records are made by both cores."""
    paths = RunPaths(root)
    run = open_run(paths, seed=1).id
    create_next(paths, parent=0, step=0)
    files.make_directory(paths.checkpoint(_ID))
    shares = [range(start, world, 2) for start in range(2)]
    with ProcessPoolExecutor(2) as pool:
        for _ in pool.map(_leave, [root] * 2, [run] * 2, shares, [world] * 2, [leaves] * 2):
            pass
    return paths, _ID


def _leave(root: Path, run: str, ranks: range, world: int, leaves: int) -> None:
    paths = RunPaths(root)
    files.sync = lambda fd, path: None  # what is measured is what comes after
    files.sync_directory = lambda path: None
    for rank in ranks:
        made = record(run, rank, world, leaves)
        shard = paths.checkpoint(_ID) / made.files[0].name
        fd = os.open(shard, os.O_CREAT | os.O_WRONLY, 0o644)
        os.truncate(fd, made.nbytes)
        os.close(fd)
        assemble.leave_record(paths, made)


def sample(world: int, most: int) -> Iterator[int]:
    """Some ranks, the first and the last among them."""
    count = min(world, most)
    return (number * (world - 1) // max(1, count - 1) for number in range(count))
