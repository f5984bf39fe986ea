"""A file system that fails for a moment is no damage: no good checkpoint is passed over, or void, for that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepwell.errors import DamagedError, StorageError
from stepwell.storage.store import assemble, catalog, commit, files, passing_errors
from tests.storage.store.test_assemble import WORLD, Scene

NAMES = ("EIO", "ESTALE", "ETIMEDOUT", "EMFILE")


class Failing:
    """Opening files fails so many times. `pauses`: what was waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, is_shared: bool = True) -> None:
        self.left, self.pauses, number = 0, list[float](), getattr(errno, name)
        inner = files.no_follow.open_file

        def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
            if self.left and not flags & os.O_ACCMODE and path.name not in ("run.json", "0001.json"):
                self.left -= 1
                raise OSError(number, os.strerror(number), str(path))
            return inner(path, flags, mode)

        monkeypatch.setattr(files.no_follow, "open_file", open_file)
        monkeypatch.setattr(passing_errors.time, "sleep", self.pauses.append)
        monkeypatch.setattr(passing_errors, "is_shared", lambda path: is_shared)


@pytest.mark.parametrize("name", NAMES)
def test_a_read_is_tried_again_and_then_the_storage_is_said_to_fail(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, failing = tmp_path / "x", Failing(monkeypatch, name)
    path.write_bytes(b"whole")
    failing.left = 3
    assert files.get(path) == b"whole" and len(failing.pauses) == 3
    failing.left = 4
    with pytest.raises(StorageError, match=r"x: cannot be read now: .*says nothing about what lies there"):
        files.get(path)


def test_a_bad_sector_of_a_local_disk_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same error, which does not pass there."""
    path, failing = tmp_path / "x", Failing(monkeypatch, "EIO", is_shared=False)
    path.write_bytes(b"whole")
    failing.left = 4
    with pytest.raises(DamagedError, match="x: cannot be opened: Input/output error"):
        files.get(path)


def test_what_is_no_such_error_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, "EIO")
    with pytest.raises(DamagedError, match="No such file"):
        files.get(tmp_path / "missing")
    assert not files.exists(tmp_path / "missing") and files.list_names(tmp_path / "missing") == []
    assert failing.pauses == []


def test_a_name_that_cannot_be_looked_at_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a committed checkpoint whose manifest cannot be seen now would be passed over without a word."""

    def lstat(path: Path) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(passing_errors.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files.no_follow, "lstat", lstat)
    for look in (files.exists, files.is_directory, files.facts):
        with pytest.raises(StorageError):
            look(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_neither_a_commit_nor_a_scan_takes_it_for_damage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering all records is tried again by the leader's agent, and the checkpoint is not void."""
    scene = Scene(tmp_path / "run")
    scene.leave(0, 1, 2)
    failing = Failing(monkeypatch, name)
    failing.left = 1 << 30
    with pytest.raises(StorageError):
        scene.gather()
    failing.left = 0
    assert scene.gather() == [0, -1, -2]
    found = assemble.gather(scene.paths, scene.id, WORLD)
    manifest = assemble.make_manifest([summary for summary in found if not isinstance(summary, int)])
    commit.publish_manifest(scene.paths, manifest)
    failing.left = 1 << 30
    with pytest.raises(StorageError):
        catalog.scan(scene.paths)
    failing.left = 0
    assert catalog.scan(scene.paths)[0].is_good
