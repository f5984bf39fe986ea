"""The run's key on all ranks: the same, or an error that names who has another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.ranks.groups import group_key as key_module
from stepwell.ranks.groups.group_key import common_key
from stepwell.ranks.wire.secret import draw_secret
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.run_secret import make_local, make_shared, read_local, read_shared
from tests.ranks.groups.circle import Circle


def meet(make: Callable[[], None], reads: list[Callable[[], bytes]]) -> list[bytes | ConfigError]:
    """What each rank gets."""
    circle = Circle(len(reads))

    def go(rank: int) -> bytes | ConfigError:
        try:
            return common_key(circle.rank(rank), "run", make, reads[rank])
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(reads)) as pool:
        return list(pool.map(go, range(len(reads))))


def test_rank_0_makes_it_and_all_read_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    found = meet(lambda: make_shared(paths), [lambda: read_shared(paths)] * 3)
    assert len(set(map(str, found))) == 1 and found[0] == read_shared(paths) == read_local(paths)


def test_one_that_has_another_secret_is_named() -> None:
    for error in meet(lambda: None, [lambda: b"a" * 32, lambda: b"a" * 32, lambda: b"b" * 32]):
        assert isinstance(error, ConfigError) and "rank 2 is not that of rank 0" in str(error)
        assert error.fields["rank"] == 2


def test_one_that_cannot_read_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_SHOWN_SECONDS", 0.1)
    here, there = RunPaths(tmp_path), RunPaths(tmp_path / "elsewhere")
    first, second = meet(lambda: make_shared(here), [lambda: read_shared(here), lambda: read_shared(there)])
    assert isinstance(first, ConfigError) and str(first).startswith("rank 1: ") and "STEPWELL_SECRET" in str(first)
    assert isinstance(second, ConfigError) and "elsewhere/secret" in str(second)


def test_a_file_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    """As on a network file system."""
    asked: list[int] = []

    def read() -> bytes:
        asked.append(1)
        if len(asked) < 3:
            raise FileNotFoundError("not yet")
        return b"k" * 32

    assert meet(lambda: None, [lambda: b"k" * 32, read]) == [b"k" * 32] * 2


def test_the_variable_counts_more_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, secret = RunPaths(tmp_path), draw_secret()
    monkeypatch.setenv("STEPWELL_SECRET", secret)
    make_shared(paths)
    assert read_shared(paths) == bytes.fromhex(secret) and os.listdir(tmp_path) == []
    assert read_local(paths) == bytes.fromhex(secret), "where no file can be, it names the agents too"
    make_local(paths)
    assert read_local(paths) != bytes.fromhex(secret), "or commands without it would not find them"


def test_one_that_others_can_read_is_refused_but_tells_who_lives(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    make_local(paths)
    key = read_local(paths)
    os.chmod(tmp_path / "secret", 0o644)
    with pytest.raises(ConfigError):
        read_local(paths)
    assert read_local(paths, to_look=True) == key
