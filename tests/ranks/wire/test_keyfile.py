"""The secret in a file: made once, for its user alone, and refused in any other shape."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.ranks.wire.keyfile import make_keyfile, read_keyfile
from stepwell.ranks.wire.secret import draw_secret, key_from_environment


def test_it_is_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_keyfile(path)
    first = read_keyfile(path)
    make_keyfile(path)
    assert read_keyfile(path) == first and len(first) == 32
    assert os.stat(path).st_mode & 0o7777 == 0o600
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_umask_changes_nothing(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_keyfile(tmp_path / "secret")
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "secret").st_mode & 0o7777 == 0o600
    read_keyfile(tmp_path / "secret")


def test_many_at_once_have_one(tmp_path: Path) -> None:
    gate = threading.Barrier(8)

    def make(number: int) -> bytes:
        gate.wait(30)
        make_keyfile(tmp_path / "secret")
        return read_keyfile(tmp_path / "secret")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1
    assert os.listdir(tmp_path) == ["secret"]


def test_nobody_made_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_keyfile(tmp_path / "secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_one_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    make_keyfile(path)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        read_keyfile(path)
    assert path.read_text().strip() not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_one_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_keyfile(path)
    os.chown(path, 54321, -1)
    with pytest.raises(ConfigError, match="belongs to user 54321"):
        read_keyfile(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    make_keyfile(tmp_path / "other")
    if kind == "link":
        path.symlink_to("other")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    with pytest.raises(ConfigError, match="remove it"):
        read_keyfile(path)
    make_keyfile(path)  # what is there is never replaced, and nothing is made where a link leads
    with pytest.raises(ConfigError):
        read_keyfile(path)


@pytest.mark.parametrize("content", ["", "0" * 63, "0" * 65, "g" * 64, "\n" * 64, "x" * 10_000])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, content.encode())
    os.close(fd)
    with pytest.raises(ConfigError, match="does not hold a secret"):
        read_keyfile(path)


def test_a_file_system_that_keeps_no_modes_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: os.chmod(fd, 0o777))
    with pytest.raises(ConfigError, match="mode 0777"):
        make_keyfile(tmp_path / "secret")
    assert os.listdir(tmp_path) == []


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = draw_secret()
    monkeypatch.setenv("STEPWELL_SECRET", f" {secret}\n")
    assert key_from_environment() == bytes.fromhex(secret)
    monkeypatch.setenv("STEPWELL_SECRET", "")
    assert key_from_environment() is None
    monkeypatch.setenv("STEPWELL_SECRET", "hunter2")
    with pytest.raises(ConfigError, match=r"STEPWELL_SECRET: .* 64 hex digits") as caught:
        key_from_environment()
    assert "hunter2" not in str(caught.value)
