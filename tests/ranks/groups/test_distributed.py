"""What holds for groups over torch.distributed: training's own collectives and ours do not meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.groups.launch import Backend, Stage

Play = Callable[[Backend, str, int], Stage]


@pytest.mark.parametrize("scene", ["training", "store in use"])
def test_training_and_we_do_not_wait_for_each_other(play: Play, torch_backend: Backend, scene: str) -> None:
    play(torch_backend, scene, 3).results()


def test_control_on_one_connection_they_do(play: Play, torch_backend: Backend) -> None:
    assert all(result["missing"] for result in play(torch_backend, "store shared", 3).results().values())


def test_old_rounds_leave_the_store(play: Play, torch_backend: Backend) -> None:
    play(torch_backend, "few keys", 3).results()


@pytest.mark.parametrize("requests", [0, 1, 2, 3])
@pytest.mark.parametrize(("backend", "victim"), [("file", "leader"), ("tcp", "last")], indirect=["backend"])
def test_all_agree_whatever_a_rank_has_done_when_it_is_killed(
    play: Play, backend: Backend, victim: str, requests: int
) -> None:
    """Rank 0 with a store that outlives it. It dies when all others have come, so it is likely the last one."""
    gone = 0 if victim == "leader" else 2
    for result in play(backend, f"{victim} dies after {requests}", 3).results(gone).values():
        assert result.get("missing") == (None if requests else [gone]), result


def test_a_line_between_processes(play: Play, torch_backend: Backend) -> None:
    play(torch_backend, "line", 3).results(2)


def test_a_line_between_nodes(play: Play, torch_backend: Backend) -> None:
    play(torch_backend, "line between nodes", 3).results()


def test_a_rank_that_cannot_connect_is_named_by_all(play: Play, torch_backend: Backend) -> None:
    for result in play(torch_backend, "line cannot connect", 3).results().values():
        assert result["missing"] == [2]
        assert "rank 2 could not connect to rank 0 within 1 s (port 1: 127.0.0.1" in result["error"]


@pytest.mark.parametrize("victim", [0, 2, 5])
def test_a_rank_that_is_killed_is_lost_with_who_is_behind_it(play: Play, torch_backend: Backend, victim: int) -> None:
    play(torch_backend, f"line without {victim}", 6).results(victim)
