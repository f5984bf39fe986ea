"""The secret of a run in a bucket: one object for its ranks, and a file of this machine for the names of its agents."""

from __future__ import annotations

import os

import pytest

from stepwell.errors import ConfigError
from stepwell.ranks.wire.secret import draw_secret
from stepwell.storage.store import files, mirror
from stepwell.storage.store.objects import ObjectFacts, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.run_secret import make_local, make_shared, read_local, read_shared


def test_it_is_made_once_and_read_by_all(address: ObjectPath) -> None:
    make_shared(RunPaths(address))
    first = read_shared(RunPaths(address))
    make_shared(RunPaths(address))
    assert read_shared(RunPaths(address, rank=1)) == first and len(first) == 32


def test_what_is_no_secret_is_refused(address: ObjectPath) -> None:
    files.put_new(address / "secret", b"hunter2", point="secret")
    with pytest.raises(ConfigError, match="does not hold a secret") as caught:
        read_shared(RunPaths(address))
    assert "hunter2" not in str(caught.value)


def test_with_the_variable_there_is_no_object(address: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = draw_secret()
    monkeypatch.setenv("STEPWELL_SECRET", secret)
    make_shared(RunPaths(address))
    assert read_shared(RunPaths(address)) == bytes.fromhex(secret)
    assert not files.exists(address / "secret")


def test_agents_are_named_by_a_file_of_this_machine_that_stays_here(address: ObjectPath) -> None:
    paths = RunPaths(address)
    make_local(paths)
    assert os.stat(paths.desk / "secret").st_mode & 0o7777 == 0o600
    seen: dict[str, ObjectFacts] = {}
    mirror.publish(paths, seen, is_last=True)
    assert read_local(paths) is not None and not files.exists(address / "secret")
