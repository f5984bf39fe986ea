"""A rank that was frozen while the others went on without it can neither commit nor change anything when it wakes up.

All processes of the rank stop, its agent included. The other ranks are killed and the job is started again, as a new
lineage, with another process in the frozen one's place.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stepwell.storage.store import catalog
from stepwell.storage.store.lineage import read_history
from tests.crash.harness import Process, wait_for
from tests.crash.test_fencing import listing
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Job, Launch

WORLD = 4
ARGUMENTS = ("--samples", 96, "--epochs", 4)


def live(job: Job) -> list[str]:
    """The checkpoints of the true history."""
    return [str(entry.id) for entry in catalog.scan(job.paths) if entry.is_committed and entry.is_live]


def leave_behind(job: Job, launch: Launch, rank: int) -> list[Process]:
    """Freeze one rank, kill all others with their agents."""
    frozen = job.freeze(rank)
    launch.kill([other for other in range(WORLD) if other != rank])
    for other in range(WORLD):
        if other != rank:
            job.kill_agents_of(other)
    return frozen


def thaw(job: Job, launch: Launch, rank: int, frozen: list[Process]) -> None:
    """Let the frozen rank and its agent go on to their end: the rank's peers are gone, so it cannot end well."""
    for process in frozen:
        process.signal(signal.SIGCONT)
        process.close()
    assert launch.ranks[rank].wait() != 0, launch.logs()
    launch.end_store()
    wait_for(lambda: not _close(job.agents()), "its agent ends")


def _close(processes: list[Process]) -> int:
    for process in processes:
        process.close()
    return len(processes)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, soak(2)])
def test_a_frozen_rank_wakes_up_after_the_others_finished(
    rank: int, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    barrier = tmp_path / "barrier"
    job = make_job("job", *ARGUMENTS, "--stop", f"11:{barrier}", STEPWELL_LINGER="1")
    old = job.launch(WORLD)
    job.wait_at(barrier, old)
    job.wait_committed(6, old)
    frozen = leave_behind(job, old, rank)
    barrier.touch()
    job.launch(WORLD).wait_well()
    assert read_history(job.paths).newest == 2
    before, true = listing(job.paths.root, {2}), live(job)
    thaw(job, old, rank, frozen)
    assert before and listing(job.paths.root, {2}) == before
    assert live(job) == true
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None


def stop_inside_commit(job: Job, rank: int, point: str, barrier: Path) -> tuple[Launch, list[Process]]:
    """All ranks came to the barrier, one of their agents to a point of its commit; everybody else is dead."""
    mark, nth = job.folder / "mark", 1 if point == "prune.begin" else 3
    crash = {"STEPWELL_CRASH": f"agent!{point}:{rank}:{nth}:stop", "STEPWELL_CRASH_MARK": str(mark)}
    launch = job.launch(WORLD, each={rank: crash})
    job.wait_while_alive(launch, lambda: mark.exists() and mark.read_text(), "the agent reaches the point")
    job.wait_at(barrier, launch)
    frozen = leave_behind(job, launch, rank)
    barrier.touch()
    return launch, frozen


@pytest.mark.parametrize(
    ("rank", "point"),
    [(0, "manifest.written"), soak(0, "record.linked"), soak(0, "prune.begin"), soak(3, "shard.synced")],
)
def test_an_agent_frozen_inside_its_commit(
    rank: int, point: str, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    """It stands at a named point of its commit, so that the very next file operation there is what it does first."""
    barrier = tmp_path / "barrier"
    job = make_job("job", *ARGUMENTS, "--sleep", 0.03, "--stop", f"20:{barrier}", STEPWELL_LINGER="1")
    old, frozen = stop_inside_commit(job, rank, point, barrier)
    job.launch(WORLD).wait_well()
    before, true = listing(job.paths.root, {2}), live(job)
    thaw(job, old, rank, frozen)
    assert before and listing(job.paths.root, {2}) == before
    assert live(job) == true
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None


def test_control_without_a_successor_the_frozen_agent_commits(make_job: MakeJob, tmp_path: Path) -> None:
    """The same scene, but nobody went on: what it was about to commit becomes a checkpoint when it thaws."""
    barrier = tmp_path / "barrier"
    job = make_job("job", *ARGUMENTS, "--sleep", 0.03, "--stop", f"20:{barrier}", STEPWELL_LINGER="1")
    old, frozen = stop_inside_commit(job, 0, "manifest.written", barrier)
    before = job.newest_step()
    thaw(job, old, 0, frozen)
    assert job.newest_step() > before
    assert before > 0
