"""What all ranks find by counting they must find at the same steps, whatever one of them hears too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.events import journal
from stepwell.ranks.agreement import Action
from stepwell.storage.store.paths import RunPaths
from stepwell.training.loop.schedule import Schedule
from stepwell.training.policy.every import Every, Never, Policy
from stepwell.types import Owner


def make(tmp_path: Path, rank: int, policy: Policy, memory: Policy | None = None) -> Schedule:
    log = journal.EventLog(tmp_path / f"events.{rank}", who="trainer")
    return Schedule(RunPaths(tmp_path, rank), Owner(rank, 2), policy, memory, log)


def sure(pace: Schedule, step: int) -> set[str]:
    return pace.wishes(step, is_epoch_end=False, again=False)[0]


def walk(pace: Schedule, steps: int, planned: set[int]) -> dict[int, set[str]]:
    """What is due by counting at each step; `planned` are saves that this rank took part in beside that."""
    found = {}
    for step in range(1, steps + 1):
        due = sure(pace, step)
        if due:
            found[step] = due
            pace.restart(step, durable=Action.SAVE in due)
        if step in planned and Action.SAVE not in due:
            pace.restart(step, durable=True, is_apart=True)
    return found


@pytest.mark.parametrize(
    ("policy", "memory"),
    [(Every(steps=3), None), (Every(steps=5), Every(steps=2)), (Every(seconds=1e9), Every(steps=3))],
)
def test_a_plan_that_one_rank_missed_changes_no_count(tmp_path: Path, policy: Policy, memory: Policy | None) -> None:
    expected = walk(make(tmp_path, 0, policy, memory), 30, set())
    assert expected
    assert walk(make(tmp_path, 1, policy, memory), 30, {4, 7, 12, 13, 20}) == expected


def test_control_what_all_ranks_take_by_themselves_does(tmp_path: Path) -> None:
    one, other = make(tmp_path, 0, Every(steps=3)), make(tmp_path, 1, Every(steps=3))
    other.restart(1, durable=True)
    assert walk(one, 9, set()) != walk(other, 9, set())


def test_a_policy_by_the_clock_does_not_keep_memory_from_being_counted(tmp_path: Path) -> None:
    """Rank 0 finds that it is time to save and plans it; at this very step the others know nothing of that."""
    pace = make(tmp_path, 0, Every(seconds=1e-9), Every(steps=2))
    assert pace.wishes(2, is_epoch_end=False, again=False) == ({Action.MEMORY}, [Action.SAVE])
    counted = make(tmp_path, 1, Every(steps=2), Every(steps=2))
    assert counted.wishes(2, is_epoch_end=False, again=False) == ({Action.SAVE}, [])


def test_alone_a_save_restarts_everything(tmp_path: Path) -> None:
    pace = Schedule(
        RunPaths(tmp_path), Owner(), Every(steps=3), Never(), journal.EventLog(tmp_path / "events", who="trainer")
    )
    pace.restart(2, durable=True)
    assert not sure(pace, 3) and sure(pace, 5) == {Action.SAVE}
