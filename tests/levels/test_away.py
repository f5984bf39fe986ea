"""A shared place that is away for a while, renamed or not mounted, is no other owner of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.errors import FencedError, StorageError, VoidError
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, commit, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner
from tests.crash.harness import wait_for
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.training.loop.small import Small

SAMPLES, EPOCHS = 96, 12
ARGUMENTS = ("--samples", SAMPLES, "--epochs", EPOCHS)


def move_away(run: Path) -> None:
    run.rename(run.with_name("away"))


def leave_empty(run: Path) -> None:
    """As a mount point without what is mounted there."""
    move_away(run)
    run.mkdir()


def bring_back(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    run.with_name("away").rename(run)


AWAY = [move_away, leave_empty]


@pytest.mark.parametrize("go", AWAY)
def test_what_is_not_there_is_no_fence_and_no_void(go: Callable[[Path], None], run_dir: Path) -> None:
    paths = RunPaths(run_dir)
    open_run(paths, seed=1)
    for _ in range(2):
        create_next(paths, parent=0, step=0)
    id = CheckpointId(3, 0, 2)
    commit.open_checkpoint(paths, id, Owner(1, 2))
    go(run_dir)
    for look in (lambda: commit.check_fence(paths, id), lambda: assemble.check_waiting(paths, id)):
        with pytest.raises(StorageError, match="lineage 2"):
            look()
    bring_back(run_dir)
    commit.check_fence(paths, id)
    assemble.check_waiting(paths, id)
    with pytest.raises(VoidError):
        assemble.check_waiting(paths, CheckpointId(4, 0, 2))
    create_next(paths, parent=0, step=0)
    with pytest.raises(FencedError):
        commit.check_fence(paths, id)


@pytest.mark.parametrize("go", AWAY)
def test_a_save_that_was_asked_for_meanwhile_is_there_afterwards(go: Callable[[Path], None], run_dir: Path) -> None:
    run = Small(run_dir, {"policy": stepwell.Never()})
    run.train(stop_after=2)
    run.ckpt.save().wait(60)
    go(run_dir)
    run.train(stop_after=2)
    handle = run.ckpt.save()
    wait_for(lambda: tries(run_dir.with_name("away")), "the agent has tried")
    bring_back(run_dir)
    assert handle.wait(60) == "step-000000000004.l0001"
    run.ckpt.close()
    assert not run.events("fenced")


def tries(run: Path) -> bool:
    return "persist-failed" in (run / "events.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("go", "levels"), [(leave_empty, True), (move_away, False), soak(move_away, True)])
def test_many_ranks_go_on_and_end_well(
    go: Callable[[Path], None], levels: bool, make_job: MakeJob, straight: Straight
) -> None:
    wishes = ("--protect", "Pairs()", "--flush", 2) if levels else ()
    job = make_job("job", "--sleep", 0.03, *wishes, *ARGUMENTS, kind=Cluster)
    assert isinstance(job, Cluster)
    launch = job.start("aabb")
    job.wait_while_alive(launch, job.flushed, "something is in the shared place")
    go(job.where)
    reached = job.ledger.last_step(0)
    kinds = ("flush-failed", "persist-failed", "mark-failed")
    job.wait_while_alive(launch, lambda: has_failed(job.where.with_name("away"), kinds), "it was missed")
    job.wait_step(reached + 9, launch)
    bring_back(job.where)
    launch.wait_well()
    wait_for(lambda: job.flushed()[-1] == 6 * EPOCHS, "the end is in the shared place")
    assert not job.events("fenced")
    assert [event for event in job.events("flush-failed") if event["action"] == "given up"] == []
    assert job.difference(straight(4, *ARGUMENTS)) is None
    job.check_nothing_left()


def has_failed(run: Path, kinds: tuple[str, ...]) -> bool:
    return any(kind in path.read_text() for path in run.glob("events*.jsonl") for kind in kinds)


class Leaving:
    """The shared place goes away after something was found there, and before it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path, go: Callable[[Path], None], name: str) -> None:
        look = getattr(files, name)

        def look_and_go(*args: Any, **fields: Any) -> Any:
            found = look(*args, **fields)
            if str(args[0]).startswith(f"{run / 'step-'}") and found:
                monkeypatch.setattr(files, name, look)
                go(run)
            return found

        monkeypatch.setattr(files, name, look_and_go)


@pytest.mark.parametrize("go", AWAY)
def test_what_goes_away_while_it_is_looked_at_is_no_damage(
    go: Callable[[Path], None], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(run_dir)
    run = open_run(paths, seed=1).id
    create_next(paths, parent=0, step=0)
    id, owners = CheckpointId(3, 0, 1), [Owner(0, 2), Owner(1, 2)]
    records = [Record(run, id, owner, 1.0, (), (), {}) for owner in owners]
    commit.open_checkpoint(paths, id, owners[0])
    for record in records:
        assemble.leave_record(paths, record)
    Leaving(monkeypatch, run_dir, go, "list_names")
    assert assemble.gather(paths, id, 2) == [0, 1]
    bring_back(run_dir)
    Leaving(monkeypatch, run_dir, go, "exists")
    assert assemble.find_record(paths, id, owners[1]) is None
    bring_back(run_dir)
    put_new = files.put_new

    def put_and_go(*args: Any, **fields: Any) -> bool:
        is_new = put_new(*args, **fields)
        go(run_dir)
        return is_new

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="is gone"):
        patch.setattr(files, "put_new", put_and_go)
        assemble.leave_record(paths, records[1])
    bring_back(run_dir)
    found = assemble.gather(paths, id, 2)
    assert [item if isinstance(item, int) else item.owner for item in found] == owners
    assert [assemble.find_record(paths, id, owner) for owner in owners] == records


def test_a_snapshot_that_a_successor_took_over_is_not_fenced_by_a_place_that_goes_away(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(run_dir)
    open_run(paths, seed=1)
    create_next(paths, parent=0, step=0)
    create_next(paths, parent=1, step=3)
    id = CheckpointId(3, 0, 1)
    commit.check_fence(paths, id)
    list_names = files.list_names

    def list_and_go(*args: Any, **fields: Any) -> Any:
        found = list_names(*args, **fields)
        monkeypatch.setattr(files, "list_names", list_names)
        move_away(run_dir)
        return found

    monkeypatch.setattr(files, "list_names", list_and_go)
    with pytest.raises(StorageError, match="lineage 1"):
        commit.check_fence(paths, id)
    bring_back(run_dir)
    commit.check_fence(paths, id)
