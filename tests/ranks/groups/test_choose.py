"""Which group is chosen, and that nothing is imported for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.errors import ConfigError, GroupError
from stepwell.ranks.groups.detect import find_group
from stepwell.ranks.groups.group import default_seconds, name_ranks


@pytest.fixture(autouse=True)
def nothing_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "STEPWELL_GROUP_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("horovod.torch", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_alone() -> None:
    group = find_group()
    assert (group.rank, group.size, group.node, group.nodes, group.local_size, group.is_leader) == (0, 1, 0, 1, 1, True)
    assert group.all_gather({"a": [1]}, "a value") == [{"a": [1]}]
    assert group.broadcast("b", "a value") == "b"
    group.barrier("nobody")
    group.close()
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.barrier("after the end")


def test_what_is_not_json_is_refused() -> None:
    group = find_group()
    with pytest.raises(TypeError):
        group.all_gather(object(), "a value")
    group.barrier("nothing was sent, so the group goes on")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_that_are_not_connected_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=r"init_process_group\(\)"):
        find_group()


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_a_world_of_one_is_alone(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    assert find_group().size == 1


def test_frameworks_that_are_imported_but_idle_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: Any = SimpleNamespace(is_initialized=lambda: False, Is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "horovod.torch", idle)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", idle)
    assert find_group().size == 1


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from stepwell.ranks.groups.detect import find_group; find_group()\n"
        "print([name for name in ('torch', 'mpi4py', 'horovod', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_default_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_seconds() == 600
    monkeypatch.setenv("STEPWELL_GROUP_SECONDS", "7.5")
    assert default_seconds() == 7.5
    monkeypatch.setenv("STEPWELL_GROUP_SECONDS", "soon")
    with pytest.raises(ConfigError, match="STEPWELL_GROUP_SECONDS=soon"):
        default_seconds()


def test_how_ranks_are_named() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([1, 2]) == "ranks 1 and 2"
    assert name_ranks(iter([1, 2, 5])) == "ranks 1, 2 and 5"
