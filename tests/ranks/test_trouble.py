"""One rank has a problem and all ranks act alike: void snapshots, damaged shards, deaths inside the restore."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.crash.harness import wait_for
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Job
from tests.ranks.test_skew import attempted, committed
from tests.tools.cli.commands import flip

WORLD = 4
ARGUMENTS = ("--samples", 96, "--epochs", 4)


@pytest.mark.parametrize("rank", [2, soak(0)])
def test_an_object_that_refuses_makes_the_checkpoint_void_for_all(
    rank: int, make_job: MakeJob, straight: Straight
) -> None:
    job = make_job("job", *ARGUMENTS, "--refuse", f"6:{rank}", "--sleep", 0.02)
    job.launch(WORLD).wait_well()
    check_void(job, 6, "refuses to tell its state")
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None
    job.check_nothing_left()


@pytest.mark.parametrize("rank", [0, soak(3)])
def test_a_leaf_that_changes_under_the_copy_makes_the_checkpoint_void_for_all(
    rank: int, make_job: MakeJob, straight: Straight
) -> None:
    """In step 7, while the snapshot of step 6 is being copied, slowly. Small leaves would be copied at the trigger."""
    arguments = (*ARGUMENTS, "--width", 256)
    job = make_job("job", *arguments, "--touch", f"7:{rank}", "--sleep", 0.02)
    job.launch(WORLD, each={rank: {"RANKS_SLOW_COPY": "0.02"}}).wait_well()
    assert [event["step"] for event in job.events("snapshot-void") if event.get("rank", 0) == rank] == [6]
    check_void(job, 6, "is void")
    assert job.difference(straight(WORLD, *arguments)) is None
    job.check_nothing_left()


def check_void(job: Job, step: int, reason: str) -> None:
    """That step is no checkpoint, the log says why, and later ones are."""
    assert step not in committed(job), committed(job)
    assert any(later > step for later in committed(job))
    said = [event for event in job.events() if event.get("step") == step and reason in json.dumps(event)]
    assert said, f"no event says why step {step} is void"
    left = [path for path in job.paths.root.iterdir() if path.name.startswith(f"step-{step:012d}")]
    assert not left, left
    first, *others = attempted(job)
    assert all(steps == first for steps in others), attempted(job)


@pytest.mark.parametrize("rank", [1, soak(0), soak(3)])
def test_one_flipped_bit_makes_all_ranks_fall_back_together(
    rank: int, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    barrier = tmp_path / "barrier"
    job = make_job("job", *ARGUMENTS, "--sleep", 0.03, "--stop", f"11:{barrier}")  # time to write each of them
    launch = job.launch(WORLD)
    job.wait_at(barrier, launch)
    wait_for(lambda: len([entry for entry in job.good() if entry.is_live]) >= 2, "two checkpoints")
    launch.kill()
    launch.wait()
    job.kill_agents()
    barrier.touch()
    newest, older = [entry for entry in job.good() if entry.is_live][:2]
    shard = newest.path / f"rank-{rank:05d}.safetensors"
    flip(shard, os.path.getsize(shard) - 100)
    again = job.launch(WORLD)
    again.wait_well()
    assert job.ledger.resumed() == {0: 0, 1: older.id.step}  # which also says that all ranks agree
    assert any(event["directory"] == newest.id.directory for event in job.events("damage"))
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None
    job.check_nothing_left()


@pytest.mark.parametrize(("rank", "how"), [(2, "kill"), soak(0, "stop"), soak(0, "kill"), soak(2, "stop")])
def test_a_rank_that_is_lost_inside_restore_is_named(
    rank: int, how: str, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    barrier = tmp_path / "barrier"
    job = make_job("job", *ARGUMENTS, "--stop", f"8:{barrier}", STEPWELL_GROUP_SECONDS="4")
    launch = job.launch(WORLD)
    job.wait_at(barrier, launch)
    job.wait_committed(6, launch)
    launch.kill()
    launch.wait()
    barrier.touch()
    mark = tmp_path / "mark"
    crash = {
        "STEPWELL_CRASH": f"trainer!restore.loaded:{rank}:1:{how}",
        "STEPWELL_CRASH_MARK": str(mark),
    }
    second = job.launch(WORLD, each={rank: crash})
    others = [process for number, process in enumerate(second.ranks) if number != rank]
    for process in others:
        assert process.wait(40) == 1, second.logs()
        assert re.search(rf"\brank {rank}\b", process.log()), f"nobody names rank {rank}\n{second.logs()}"
    wait_for(mark.exists, "the rank came to that point")
    second.kill([rank])
    second.end_store()
    job.launch(WORLD).wait_well()
    assert job.ledger.resumed()[2] >= 6
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None
    job.check_nothing_left()
