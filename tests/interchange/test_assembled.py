"""A tensor put together from the parts of several ranks: rows, columns, blocks; each rank's own ones stay apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepwell.errors import DamagedError
from stepwell.format.box import Box
from stepwell.format.checksum import block_digest
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.interchange import assembled as module
from stepwell.interchange.assembled import assembled
from stepwell.interchange.compare import compare_readers
from stepwell.types import CheckpointId, Owner

PAGE = 4096


def store(folder: Path, rank: int, world: int, parts: Sequence[tuple[str, torch.Tensor, Box | None]]) -> Record:
    """A rank's shard with these parts; no box: the rank's own tensor."""
    data, leaves = bytearray(PAGE), []
    for name, whole, box in parts:
        piece = whole if box is None else whole[tuple(slice(*ends) for ends in zip(box.offsets, box.ends, strict=True))]
        start = len(data)
        data += piece.contiguous().numpy().tobytes()
        shape = tuple(whole.shape)
        offsets = (0,) * len(shape) if box is None else box.offsets
        place = (name, 0, "float32", tuple(piece.shape), start, len(data), "value", "cpu", shape, offsets)
        leaves.append(LeafEntry(*place, private=box is None))
    blocks = tuple(block_digest(data[at : at + PAGE]) for at in range(0, len(data), PAGE))
    file = FileEntry(f"rank-{rank:05d}.safetensors", "safetensors", len(data), PAGE, blocks)
    folder.mkdir(exist_ok=True)
    (folder / file.name).write_bytes(data)
    tree = {name: {"$tensor": name} for name in ("shared", "own", "number")}
    owner = Owner(rank, world)
    return Record("0" * 32, CheckpointId(1, 0, 1), owner, 0.0, (file,), tuple(leaves), tree)


CUTS = {
    "rows": [Box((0, 0, 0), (5, 7, 3)), Box((5, 0, 0), (6, 7, 3))],
    "columns": [Box((0, 0, 0), (11, 4, 3)), Box((0, 4, 0), (11, 3, 3))],
    "blocks": [
        Box((0, 0, 0), (6, 7, 2)),
        Box((6, 0, 0), (5, 3, 3)),
        Box((0, 0, 2), (6, 7, 1)),
        Box((6, 3, 0), (5, 4, 3)),
    ],
}


def make(folder: Path, boxes: Sequence[Box], own: float = 0.0) -> list[Record]:
    shared, number = torch.arange(11 * 7 * 3, dtype=torch.float32).reshape(11, 7, 3), torch.tensor(5.0)
    records = []
    for rank, box in enumerate(boxes):
        parts: list[tuple[str, torch.Tensor, Box | None]] = [("shared", shared, box)]
        parts.append(("own", torch.full((3,), rank + (own if rank else 0.0)), None))
        parts += [("number", number, Box((), ()))] if rank == 0 else []
        records.append(store(folder, rank, len(boxes), parts))
    return records


@pytest.mark.parametrize("rows_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_whole(cut: str, rows_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM_BYTES", rows_bytes)
    wanted = torch.arange(11 * 7 * 3, dtype=torch.float32).numpy().tobytes()
    for rank, view in enumerate(assembled(make(tmp_path / "a", CUTS[cut]), tmp_path / "a")):
        leaf = view.entries["shared"]
        assert leaf.shape == (11, 7, 3)
        assert view.read(leaf, 0, len(wanted)) == wanted
        assert view.read(leaf, 100, 333) == wanted[100:433]
        own = torch.full((3,), float(rank)).numpy().tobytes()
        assert view.read(view.entries["own"], 0, 12) == own
        assert view.read(view.entries["number"], 0, 4) == torch.tensor(5.0).numpy().tobytes()
        view.close()


def test_cuts_do_not_matter_to_a_comparison_and_a_rank_s_own_does(tmp_path: Path) -> None:
    one = assembled(make(tmp_path / "a", CUTS["rows"]), tmp_path / "a")
    two = assembled(make(tmp_path / "b", CUTS["columns"], own=0.5), tmp_path / "b")
    found = [[change.path for change in compare_readers(*pair).changes] for pair in zip(one, two, strict=True)]
    for view in (*one, *two):
        view.close()
    assert found == [[], ["own"]]


def test_a_part_that_is_missing_is_damage(tmp_path: Path) -> None:
    records = make(tmp_path / "a", CUTS["rows"])
    records[1] = replace(records[1], leaves=records[1].leaves[1:])
    view = assembled(records, tmp_path / "a")[0]
    with pytest.raises(DamagedError, match="do not make up"):
        view.read(view.entries["shared"], 0, 900)
    view.close()
    with pytest.raises(DamagedError, match="missing"):
        assembled(records[1:], tmp_path / "a")
