"""What every group does, whatever it stands on; each case in real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.groups.launch import Backend, Stage
from tests.ranks.groups.scenes import VOTE

Play = Callable[[Backend, str, int], Stage]


def cases(*sizes: int) -> pytest.MarkDecorator:
    """Each backend, with so many ranks; the store in a file has nothing that would depend on their number."""
    pairs = [(backend, size) for backend in ("tcp", "mpi") for size in sizes] + [("file", 3), ("horovod", 2)]
    return pytest.mark.parametrize(("backend", "size"), pairs, indirect=["backend"])


@cases(2, 3, 4)
def test_values_order_size_and_many_rounds(play: Play, backend: Backend, size: int) -> None:
    play(backend, "well", size).results()


@cases(2, 4)
def test_nodes_are_numbered_by_first_appearance(play: Play, backend: Backend, size: int) -> None:
    play(backend, "nodes", size).results()


@cases(2, 3)
def test_ranks_in_different_operations_are_told_at_once(play: Play, backend: Backend, size: int) -> None:
    for result in play(backend, "mismatch", size).results().values():
        assert "rank 1 in barrier 'the odd one'" in result["error"]
        assert "in barrier 'the others'" in result["error"]
        assert result["seconds"] < 10


@cases(2, 3, 4)
@pytest.mark.parametrize("victim", ["last", "leader"])
def test_a_rank_that_died_is_named_by_all_others(play: Play, backend: Backend, size: int, victim: str) -> None:
    if not backend.can_lose_ranks:
        pytest.skip("the launcher ends all ranks when one dies")
    gone = 0 if victim == "leader" else size - 1
    check_absence(play(backend, f"killed {victim}", size).results(gone), gone, backend)


@cases(3)
@pytest.mark.parametrize("victim", ["last", "leader"])
def test_a_rank_that_is_stopped_is_named_by_all_others(play: Play, backend: Backend, size: int, victim: str) -> None:
    gone = 0 if victim == "leader" else size - 1
    stage = play(backend, f"stopped {victim}", size)
    check_absence(stage.results(gone), gone, backend)
    stage.wake(gone)
    if victim == "last" and backend.names_missing:
        # It comes too late, and learns what the others decided.
        assert stage.results()[gone]["missing"] == [gone]


def check_absence(results: dict[int, dict[str, object]], gone: int, backend: Backend) -> None:
    assert results
    for result in results.values():
        assert result["operation"] == VOTE
        assert result["missing"] == ([gone] if backend.names_missing else [])
        who = f"rank {gone}" if backend.names_missing else "at least one rank"
        assert str(result["error"]).startswith(f"{who} did not take part in '{VOTE}' within 1.5 s")
        assert isinstance(result["seconds"], float) and result["seconds"] < 10
