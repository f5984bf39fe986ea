"""A removed checkpoint's file is kept for the next one only if nobody can notice."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.storage.store import spare
from stepwell.storage.store.spare import Spare, is_left_over

SIZE = 3 << 10


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "step").mkdir()
    path = tmp_path / "step" / "rank-00000.safetensors"
    path.write_bytes(b"old" * (SIZE // 3))
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Spare:
    return Spare(tmp_path, "rank-00000", 3, file_system="ext4")


def test_a_file_is_kept_and_given_back(file: Path, kept: Spare, tmp_path: Path) -> None:
    inode = file.stat().st_ino
    assert kept.keep(file)
    assert not file.exists() and kept.path.name == "spare.rank-00000.l0003.tmp"
    assert kept.take(tmp_path / "next")
    assert (tmp_path / "next").stat().st_ino == inode
    assert not kept.take(tmp_path / "another")
    kept.drop()


def test_one_at_a_time(file: Path, kept: Spare) -> None:
    assert kept.keep(file)
    file.write_bytes(bytes(SIZE))
    assert not kept.keep(file)
    assert file.exists()
    kept.drop()
    assert not kept.path.exists()


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "overlay", "9p", "?"])
def test_nothing_is_kept_where_another_machine_may_be_reading(kind: str, file: Path, tmp_path: Path) -> None:
    assert not Spare(tmp_path, "rank-00000", 3, file_system=kind).keep(file)
    assert file.exists()


def test_a_second_name_keeps_its_bytes(file: Path, kept: Spare, tmp_path: Path) -> None:
    os.link(file, tmp_path / "copy of the user")
    assert not kept.keep(file)


@pytest.mark.parametrize("name", ["rank-00000.frozen.safetensors", "rank-00000.json", "rank-00001.safetensors"])
def test_other_files_are_not_kept(name: str, file: Path, kept: Spare) -> None:
    other = file.with_name(name)
    file.rename(other)
    assert not kept.keep(other)


def test_a_link_is_not_followed(file: Path, kept: Spare, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    file.rename(precious)
    file.symlink_to(precious)
    assert not kept.keep(file)
    assert precious.exists()


def test_a_reader_keeps_its_bytes(file: Path, kept: Spare) -> None:
    with file.open("rb"):
        assert not kept.keep(file)
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    assert not kept.keep(file)  # mapped, as safetensors does it, with the descriptor closed
    memory.close()
    assert kept.keep(file)


def test_a_reader_in_another_process_keeps_its_bytes(file: Path, kept: Spare) -> None:
    code = "import sys; file = open(sys.argv[1], 'rb'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == "open\n"
        assert not kept.keep(file)
        reader.stdin.close()
    assert kept.keep(file)


def test_opened_just_before_the_name_went(
    file: Path, kept: Spare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look, before it is overwritten, finds the reader: the file goes, and the reader has its bytes."""
    rename, readers = spare.files.rename, []

    def slow(source: Path, target: Path) -> None:
        readers.append(source.open("rb"))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(spare.files, "rename", slow)
        assert kept.keep(file)
    assert not kept.take(tmp_path / "next")
    assert not kept.path.exists() and not (tmp_path / "next").exists()
    assert readers[0].read(3) == b"old"
    readers[0].close()


def test_given_a_second_name_while_it_waited(file: Path, kept: Spare, tmp_path: Path) -> None:
    assert kept.keep(file)
    os.link(kept.path, tmp_path / "a copy of the run made with links")
    assert not kept.take(tmp_path / "next")


def test_what_cannot_be_renamed_is_not_kept_and_not_taken(
    file: Path, kept: Spare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(spare.files, "rename", refused)
        assert not kept.keep(file)
    assert file.exists() and kept.keep(file)
    monkeypatch.setattr(spare.files, "rename", refused)
    assert not kept.take(tmp_path / "next")
    assert kept.path.exists()


def test_without_leases_nothing_is_kept(file: Path, kept: Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError("no leases here")

    monkeypatch.setattr(spare.fcntl, "fcntl", refused)
    assert not kept.keep(file)
    assert file.exists()


def test_left_over_from_an_older_lineage() -> None:
    assert is_left_over("spare.rank-00000.l0002.tmp", 3)
    assert not is_left_over("spare.rank-00000.l0003.tmp", 3)
    assert not is_left_over("spare.rank-00000.lx.tmp", 3)
    assert not is_left_over("notes.l0001.tmp", 3)
