"""Ranks that are not alike: slow ones, wrong clocks, stalled disks. All try and commit the same steps; nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.harness import wait_for
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.hooks import STALLED
from tests.ranks.launch import Job

WORLD = 4
ARGUMENTS = ("--samples", 96, "--epochs", 6)


def attempted(job: Job) -> list[list[int]]:
    """The steps of which each rank took a snapshot, or tried to."""
    kinds = {"snapshot", "snapshot-skipped", "snapshot-void"}
    steps: list[set[int]] = [set() for _ in range(WORLD)]
    for event in job.events():
        if event["kind"] in kinds:
            steps[event.get("rank", 0)].add(event["step"])
    return [sorted(found) for found in steps]


def committed(job: Job) -> list[int]:
    return sorted({event["step"] for event in job.events("commit")})


def check_agreement(job: Job, reference: Job | None = None) -> None:
    first, *others = attempted(job)
    assert first and all(steps == first for steps in others), attempted(job)
    assert committed(job) and set(committed(job)) <= set(first), (committed(job), first)
    if reference is not None:
        assert job.difference(reference) is None
    job.check_nothing_left()


@pytest.mark.parametrize("policy", ["seconds", soak("steps"), soak("auto")])
def test_a_rank_three_times_slower_and_clocks_an_hour_off(policy: str, make_job: MakeJob, straight: Straight) -> None:
    chosen = {"steps": (), "seconds": ("--seconds", 0.2), "auto": ("--auto",)}[policy]
    job = make_job("job", *ARGUMENTS, *chosen, "--sleep", 0.01, "--slow", "2:3")
    clocks = {1: {"RANKS_CLOCK_SHIFT": "3600"}, 3: {"RANKS_CLOCK_SHIFT": "-3600"}}
    job.launch(WORLD, each=clocks).wait_well()
    check_agreement(job, straight(WORLD, *ARGUMENTS))
    if policy == "steps":
        assert committed(job)[-1] == attempted(job)[0][-1]


def pass_a_stall(job: Job, rank: int, stall: Path, *, seconds: float = 0.0) -> None:
    """Train to step 30 while the disk of one rank does nothing, and for some seconds more; then let it go on."""
    late = job.barrier("late")
    stall.touch()
    launch = job.launch(WORLD, "--stop", f"30:{late}", each={rank: {"RANKS_STALL": str(stall)}})
    job.wait_at(late, launch)  # training came here while the disk did nothing
    wait_for(Path(f"{stall}{STALLED}").exists, "the agent waits for its disk")
    assert not launch.has_ended(seconds), launch.logs()
    assert job.newest_step() == 0, "nothing is a checkpoint without that rank"
    stall.unlink()
    if not seconds:  # else the leader has lost patience with all of them
        job.wait_committed(1, launch)
    late.touch()
    launch.wait_well()


@pytest.mark.parametrize("rank", [3, soak(0)])
def test_a_disk_that_stalls_holds_up_the_commits_and_not_the_steps(
    rank: int, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    """Rank 0 is the one that commits, so both sides of the agents' agreement stall once."""
    job = make_job("job", *ARGUMENTS, "--sleep", 0.01)
    pass_a_stall(job, rank, tmp_path / "stall")
    check_agreement(job, straight(WORLD, *ARGUMENTS))
    newest = job.newest()
    assert newest is not None and newest.manifest is not None and newest.manifest.finished


@pytest.mark.soak
def test_a_disk_that_stalls_for_half_a_minute(make_job: MakeJob, straight: Straight, tmp_path: Path) -> None:
    """Six times as long as a collective may take: no collective waits for a disk."""
    job = make_job("job", *ARGUMENTS, "--sleep", 0.01, STEPWELL_GROUP_SECONDS="5")
    pass_a_stall(job, 3, tmp_path / "stall", seconds=30)
    check_agreement(job, straight(WORLD, *ARGUMENTS))
    assert job.events("persist-failed") and committed(job)[-1] == attempted(job)[0][-1], "the last one is there"


def test_a_rank_whose_disk_fails_makes_the_checkpoint_void_for_all(make_job: MakeJob, straight: Straight) -> None:
    """A write that fails once: that checkpoint comes late or never, the others come.

    The first three are shard, record and summary; one of a summary alone costs nothing (`test_assemble`).
    """
    job = make_job("job", *ARGUMENTS, "--sleep", 0.01)
    job.launch(WORLD, each={2: {"STEPWELL_FAULT": "agent!write:EIO:4"}}).wait_well()
    failed = [event for event in job.events("persist-failed") if event.get("rank") == 2]
    assert failed, "the fault was hit"
    check_agreement(job, straight(WORLD, *ARGUMENTS))
