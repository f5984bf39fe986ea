"""What is committed is not written again, whoever asks; and with the check off it would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.errors import PersistError
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store import commit, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


@pytest.fixture
def committed(tmp_path: Path) -> tuple[RunPaths, CheckpointId]:
    """A checkpoint with one file and a manifest that names no records: the check looks at names alone."""
    paths = RunPaths(tmp_path / "run")
    run = open_run(paths, seed=1)
    id = CheckpointId(3, 0, create_next(paths, parent=0, step=0).number)
    directory = commit.open_checkpoint(paths, id, Owner())
    assert isinstance(directory, Path)
    directory.joinpath("rank-00000.safetensors").write_bytes(b"first")
    files.put(paths.manifest(id), Manifest(run.id, id, 1, 1.0, (), 5).dump(), point="manifest")
    return paths, id


def test_a_committed_checkpoint_is_not_opened_for_writing(committed: tuple[RunPaths, CheckpointId]) -> None:
    paths, id = committed
    with pytest.raises(PersistError, match=r"step-000000000003.l0001: this checkpoint is committed"):
        commit.open_checkpoint(paths, id, Owner())


def test_no_file_of_it_is_replaced(committed: tuple[RunPaths, CheckpointId]) -> None:
    paths, id = committed
    final = Path(str(paths.checkpoint(id))) / "rank-00000.safetensors"
    other = final.with_suffix(".tmp")
    other.write_bytes(b"other")
    with pytest.raises(PersistError, match="this checkpoint is committed"):
        commit.publish_file(other, final)
    assert final.read_bytes() == b"first"
    commit.publish_file(other, final, is_same=True)  # the control, and what a repair does that compared the bytes
    assert final.read_bytes() == b"other"
