"""Boxes of tensors: the right bytes, and no more blocks than they lie in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.restore.whole import Whole
from stepwell.storage.format.box import Box
from stepwell.storage.format.checksum import BLOCK_BYTES
from stepwell.tools.interchange.dcp_state import Behind, flat_state
from stepwell.tools.interchange.reading import Tensors, open_checkpoint
from tests.tools.cli.commands import flip

ROWS, COLUMNS = 4096, 1500
WEIGHT = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MB in one tensor, and a small one."""
    where = tmp_path_factory.mktemp("reading") / "run"
    state = {"w": WEIGHT.clone(), "b": torch.arange(3)}
    ckpt = stepwell.Checkpointer(where, policy=stepwell.Never(), state=state, grace=None)
    ckpt.restore()
    ckpt.save().wait(60)
    ckpt.close(save=False)
    return where


@pytest.fixture
def whole(run: Path) -> Whole:
    return open_checkpoint(run, None)


BOXES = [Box((0, 0), (10, COLUMNS)), Box((100, 5), (40, 3)), Box((ROWS - 1, COLUMNS - 1), (1, 1)), Box((7, 0), (0, 4))]


@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_what_slicing_gives_and_reads_little(box: Box, whole: Whole) -> None:
    wanted = WEIGHT[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]
    with contextlib.closing(Behind(whole, flat_state(whole.record.tree))) as behind:
        found = torch.full(box.shape, -1.0)
        nbytes = behind.fill([("state.w", box, found), ("state.w", box, other := torch.full(box.shape, -1.0))])
        assert torch.equal(found, wanted) and torch.equal(other, wanted)
        assert nbytes <= 4 * BLOCK_BYTES  # two blocks for each of the two, of 24 MB
        strided = torch.zeros(*reversed(box.shape), dtype=torch.float64).t()  # other type, other strides
        behind.fill([("state.w", box, strided)])
        assert torch.equal(strided, wanted.double())
    with contextlib.closing(Tensors(whole)) as tensors:
        assert bytes(tensors.read("state/w", box)) == wanted.contiguous().numpy().tobytes()


def test_only_what_is_read_has_to_be_whole(run: Path, whole: Whole) -> None:
    shard = next(run.glob("step-*/rank-00000.safetensors"))
    flip(shard, 9 * BLOCK_BYTES // 2)  # in the middle of the large one
    try:
        with contextlib.closing(Behind(whole, flat_state(whole.record.tree))) as behind:
            behind.fill([("state.b", Box.whole((3,)), small := torch.zeros(3, dtype=torch.int64))])
            assert small.tolist() == [0, 1, 2]
            with pytest.raises(stepwell.DamagedError, match="have checksum"):
                behind.fill([("state.w", Box.whole((ROWS, COLUMNS)), torch.zeros(ROWS, COLUMNS))])
    finally:
        flip(shard, 9 * BLOCK_BYTES // 2)
