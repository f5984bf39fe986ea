"""What is equal on all ranks is written once, split evenly over them, in boxes that tile every tensor."""

from __future__ import annotations

import math
import os
from collections import defaultdict

import pytest

from stepwell.storage.format import dtypes
from stepwell.storage.format.record import LeafEntry, Record
from tests.ranks.conftest import MakeJob

WIDTH = 512
"""3.2 MB of state: one row of its largest tensors is far below a tenth of a share."""
RANK_OWN_BYTES = 16 << 10
"""Generators: what each rank has for itself."""


def boxes(records: list[Record]) -> dict[str, list[LeafEntry]]:
    """All pieces of every tensor of model and optimizer that belongs to all, over all ranks."""
    found = defaultdict(list)
    for record in records:
        for leaf in record.leaves:
            if leaf.name.startswith(("model/", "optimizer/")) and not leaf.private:
                found[leaf.name].append(leaf)
    return found


def problem_of(name: str, pieces: list[LeafEntry]) -> str | None:
    """Whether boxes along dimension 0 tile a tensor: each element once."""
    shape = pieces[0].global_shape
    if any(piece.global_shape != shape for piece in pieces):
        return f"{name}: pieces of different shapes"
    if not shape:
        return None if len(pieces) == 1 else f"{name}: written {len(pieces)} times"
    reached = 0
    for piece in sorted(pieces, key=lambda piece: piece.offsets[0]):
        if piece.offsets[0] != reached or any(piece.offsets[1:]) or piece.shape[1:] != shape[1:]:
            return f"{name}: box {piece.shape} at {piece.offsets} of {shape}, expected row {reached}"
        reached += piece.shape[0]
    return None if reached == shape[0] else f"{name}: rows up to {reached} of {shape[0]}"


def nbytes_of(leaf: LeafEntry) -> int:
    return math.prod(leaf.shape) * dtypes.itemsize(leaf.dtype)


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_is_written_once_and_evenly(world: int, make_job: MakeJob) -> None:
    job = make_job("job", "--width", WIDTH, "--epochs", 1, "--draw-seed")
    job.launch(world).wait_well()
    assert job.ledger.problem(96, 1) is None, "all ranks have the seed that one of them drew"
    entry = job.newest()
    assert entry is not None and entry.manifest is not None and entry.manifest.world_size == world
    job.verify(entry)
    records = job.records(entry)
    assert [record.owner.rank for record in records] == list(range(world))
    assert [problem for name, found in boxes(records).items() if (problem := problem_of(name, found))] == []
    total = sum(nbytes_of(leaf) for record in records for leaf in record.leaves)
    one_copy = job.endings()[0]["nbytes"]
    # Buffers that differ between ranks (BatchNorm's statistics until the next forward) belong to each of them.
    buffers = 2 * 4 * WIDTH + 8
    assert one_copy <= total <= one_copy + world * (RANK_OWN_BYTES + buffers), (total, one_copy)
    sizes = [os.path.getsize(entry.path / f"rank-{rank:05d}.safetensors") for rank in range(world)]
    even = sum(sizes) / world
    assert all(abs(size - even) <= even / 10 for size in sizes), sizes
    job.check_nothing_left()


def test_one_rank_writes_whole_tensors(make_job: MakeJob) -> None:
    """The control of the arithmetic above, and what a single process did before."""
    job = make_job("job", "--width", WIDTH, "--epochs", 1)
    job.launch(1).wait_well()
    entry = job.newest()
    assert entry is not None
    records = job.records(entry)
    found = boxes(records)
    assert len(found) > 20 and not any(problem_of(name, pieces) for name, pieces in found.items())
    doubled = {name: pieces * 2 for name, pieces in found.items()}
    assert all(problem_of(name, pieces) for name, pieces in doubled.items())
