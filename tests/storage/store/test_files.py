"""The durable primitives: complete or absent, exclusive, and never led astray."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

import pytest

from stepwell.errors import DamagedError
from stepwell.storage.store import files


def test_put_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    for data in (b"one", b"two" * 1000, b""):
        files.put(tmp_path / "x", data, point="record")
        assert (tmp_path / "x").read_bytes() == data
    assert os.listdir(tmp_path) == ["x"]


def test_put_new_never_replaces(tmp_path: Path) -> None:
    assert files.put_new(tmp_path / "x", b"first", point="run")
    assert not files.put_new(tmp_path / "x", b"second", point="run")
    assert (tmp_path / "x").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_put_new_does_not_write_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "x").symlink_to(tmp_path / "outside")
    assert not files.put_new(tmp_path / "x", b"yours", point="run")
    assert (tmp_path / "outside").read_bytes() == b"mine"


def race(directory: Path, barrier: Barrier, rounds: int, exclusive: bool) -> None:
    """Two of these at once: who gets each name? Without exclusion (the control) both believe they do."""
    for number in range(rounds):
        barrier.wait(30)
        path = directory / f"{number:04d}.json"
        if exclusive:
            won = files.put_new(path, str(os.getpid()).encode(), point="lineage")
        else:
            won = not path.exists()
            barrier.wait(30)  # both have looked before either writes: the race that a check loses
            files.put(path, str(os.getpid()).encode(), point="lineage")
        if won:
            (directory / f"{number:04d}.{os.getpid()}.won").touch()


@pytest.mark.parametrize("exclusive", [True, False], ids=["put_new", "control"])
def test_of_two_processes_exactly_one_wins_each_name(tmp_path: Path, exclusive: bool) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    rounds = 30 if exclusive else 3
    processes = [context.Process(target=race, args=(tmp_path, barrier, rounds, exclusive)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for number in range(rounds):
        winners = [path.name.split(".")[1] for path in tmp_path.glob(f"{number:04d}.*.won")]
        if exclusive:
            assert winners == [(tmp_path / f"{number:04d}.json").read_text()]
        else:
            assert len(winners) == 2


def test_get_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert files.get(tmp_path / "file") == b"abc"
    assert files.get(tmp_path / "file", limit=3) == b"abc"
    for name in ("link", "directory", "fifo", "missing", "/dev/zero"):
        with pytest.raises(DamagedError, match=name):
            files.get(tmp_path / name)
    with pytest.raises(DamagedError, match="3 bytes, more than 2"):
        files.get(tmp_path / "file", limit=2)


def test_names_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert files.list_names(tmp_path) == ["a", "b", "link"]
    assert files.list_names(tmp_path / "missing") == []
    for name in ("link", "a"):
        with pytest.raises(DamagedError, match=f"{name}: cannot be opened as a directory"):
            files.list_names(tmp_path / name)


def test_a_failed_sync_throws_the_file_away(tmp_path: Path) -> None:
    files.put(tmp_path / "x", b"old", point="record")
    with mock.patch.object(os, "fsync", side_effect=OSError(5, "Input/output error")), pytest.raises(OSError):
        files.put(tmp_path / "x", b"new", point="record")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_short_writes_are_continued(tmp_path: Path) -> None:
    real = os.pwrite
    with mock.patch.object(os, "pwrite", side_effect=lambda fd, data, at: real(fd, data[:7], at)):
        files.put(tmp_path / "x", bytes(range(100)), point="record")
    assert (tmp_path / "x").read_bytes() == bytes(range(100))
