"""What a run directory holds, judged by manifest and record; and the order in which a checkpoint begins to exist."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stepwell.errors import DamagedError, FencedError
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.record import Record
from stepwell.storage.store import commit, files, no_follow
from stepwell.storage.store.catalog import read_record, scan
from stepwell.storage.store.progress import ProgressFile, boot_id, read_progress
from stepwell.types import CheckpointId, Owner
from tests.restore.build import RunBuilder


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


def state(step: int) -> dict[str, object]:
    return {"x": {"w": torch.full((3,), float(step))}}


def test_an_empty_place_has_no_checkpoints(build: RunBuilder) -> None:
    assert scan(build.paths) == []
    shutil.rmtree(build.root)
    assert scan(build.paths) == []


def test_newest_first_with_the_state_of_each(build: RunBuilder) -> None:
    build.write(state(1), 1)
    build.write(state(2), 2, suspect=True, name="odd", epoch_end=True)
    build.write(state(2), 2, repeat=1)
    build.fork(step=2)
    build.write(state(3), 3)
    torn = build.write(state(4), 4)
    (build.paths.checkpoint(torn) / "manifest.json").unlink()
    damaged = build.write(state(5), 5)
    (build.paths.checkpoint(damaged) / "manifest.json").write_bytes(b"x")
    found = scan(build.paths)
    assert [entry.id for entry in found] == [
        CheckpointId(5, 0, 2), CheckpointId(4, 0, 2), CheckpointId(3, 0, 2), CheckpointId(2, 1, 1),
        CheckpointId(2, 0, 1), CheckpointId(1, 0, 1),
    ]  # fmt: skip
    assert [(entry.is_committed, entry.is_good, entry.is_live) for entry in found] == [
        (True, False, True), (False, False, True), (True, True, True), (True, True, True), (True, True, True),
        (True, True, True),
    ]  # fmt: skip
    odd = found[4].manifest
    assert odd is not None and odd.name == "odd" and odd.epoch_end and odd.suspect == "1 non-finite, first x/w"


def test_a_record_is_checked_against_its_manifest_and_its_files(build: RunBuilder) -> None:
    first, second = build.write(state(1), 1), build.write(state(2), 2)
    manifest = build.manifest(second)
    record = read_record(build.paths, manifest)
    assert record.id == second and record.leaves[0].name == "x/w"
    directory = build.paths.checkpoint(second)
    with pytest.raises(DamagedError, match="the manifest says"):
        read_record(build.paths, replace(manifest, records=build.manifest(first).records))
    data = (directory / "rank-00000.json").read_bytes()
    ref = replace(manifest.records[0], digest=document_digest(data))
    with pytest.raises(DamagedError, match="belongs to"):
        read_record(build.paths, replace(manifest, run="f" * 16, records=(ref,)))
    shard = directory / "rank-00000.safetensors"
    with shard.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DamagedError, match=r"rank-00000.safetensors: .* bytes, the record says"):
        read_record(build.paths, manifest)
    shard.unlink()
    with pytest.raises(DamagedError, match=r"rank-00000.safetensors: No such file"):
        read_record(build.paths, manifest)


def test_a_checkpoint_in_the_place_of_another_is_damaged(build: RunBuilder) -> None:
    first, second = build.write(state(1), 1), build.write(state(2), 2)
    shutil.rmtree(build.paths.checkpoint(second))
    shutil.copytree(build.paths.checkpoint(first), build.paths.checkpoint(second))
    assert "speaks of step-000000000001.l0001, lies in step-000000000002.l0001" in (scan(build.paths)[0].damage or "")


# -- commit ----------------------------------------------------------------------------------------------------------


def test_every_file_is_durable_before_the_next_one_names_it(build: RunBuilder) -> None:
    """Shard, record, manifest: content synced, then the name, then the directory, then the next."""
    order: list[str] = []
    real_sync, real_rename, real_link, real_dir = files.sync, no_follow.rename, no_follow.link, files.sync_directory

    def kind(path: object) -> str:
        return next(word for word in ("safetensors", "manifest", "rank-00000.json") if word in str(path))

    with (
        mock.patch.object(files, "sync", lambda fd, path: (order.append(f"sync {kind(path)}"), real_sync(fd, path))),
        mock.patch.object(no_follow, "rename", lambda a, b: (order.append(f"name {kind(b)}"), real_rename(a, b))),
        mock.patch.object(no_follow, "link", lambda a, b: (order.append(f"name {kind(b)}"), real_link(a, b))),
        mock.patch.object(files, "sync_directory", lambda path: (order.append("directory"), real_dir(path))),
    ):
        build.write(state(1), 1)
    assert order == [
        "directory",  # of the run: the checkpoint's own directory was made
        "sync safetensors", "name safetensors", "directory",
        "sync rank-00000.json", "name rank-00000.json", "directory",
        "sync manifest", "name manifest", "directory",
    ]  # fmt: skip


def test_a_manifest_is_never_replaced(build: RunBuilder) -> None:
    id = build.write(state(1), 1)
    before = (build.paths.checkpoint(id) / "manifest.json").read_bytes()
    commit.publish_manifest(build.paths, replace(build.manifest(id), nbytes=7))
    assert (build.paths.checkpoint(id) / "manifest.json").read_bytes() == before


def test_a_fenced_writer_makes_no_directory_and_no_manifest(build: RunBuilder) -> None:
    id = build.write(state(1), 1)
    manifest = build.manifest(id)
    old = build.lineage
    build.fork(step=1)
    late = CheckpointId(9, 0, old)
    with pytest.raises(FencedError):
        commit.open_checkpoint(build.paths, late, Owner())
    with pytest.raises(FencedError):
        commit.publish_manifest(build.paths, replace(manifest, id=late))
    assert not build.paths.checkpoint(late).exists()


def test_frozen_leaves_are_stored_by_reference(build: RunBuilder, tmp_path: Path) -> None:
    """A hard link is one file in two checkpoints: removing the older one leaves the newer whole."""
    first = build.write(state(1), 1, frozen=["x/w"])
    source = build.paths.checkpoint(first) / "rank-00000.frozen.safetensors"
    target = tmp_path / "again"
    assert commit.share_file(source, target)
    assert os.stat(target).st_ino == os.stat(source).st_ino
    source.unlink()
    record = Record.load((build.paths.checkpoint(first) / "rank-00000.json").read_bytes(), path="x")
    assert target.stat().st_size == record.files[1].nbytes
    assert not commit.share_file(tmp_path / "missing", target)


# -- progress --------------------------------------------------------------------------------------------------------


def test_progress_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) is None
    progress = ProgressFile(path, lambda call: call())
    progress.update(5)  # not open: nothing happens
    progress.open(lineage=3, agent_pid=77, step=0)
    for step in (0, 1, 10**12):
        progress.update(step)
        found = read_progress(path)
        assert found is not None and (found.step, found.lineage, found.agent_pid) == (step, 3, 77)
        assert found.pid == os.getpid() and found.is_here()
    progress.update(11, agent_pid=78)
    progress.close()
    found = read_progress(path)
    assert found is not None and found.agent_pid == 78
    assert not replace(found, boot=bytes(16)).is_here() and found.boot == boot_id()


@pytest.mark.parametrize("data", [b"", b"stepwel1", b"x" * 64, b"stepwel2" + bytes(56), bytes(5000)], ids=len)
def test_progress_that_is_garbage_is_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "progress").write_bytes(data)
    assert read_progress(tmp_path / "progress") is None


def test_a_file_that_goes_away_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    def scan(fd: int) -> Any:
        found = list(scandir(fd))
        (tmp_path / "b").unlink(missing_ok=True)
        return contextlib.nullcontext(found)

    monkeypatch.setattr(os, "scandir", scan)
    assert sorted(files.list_facts(tmp_path)) == ["a", "c"]
