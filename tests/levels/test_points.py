"""SIGKILL at every point of the levels: of the agent there, of the one that serves it, or of everybody.

Without its agent a rank trains on. Either way the run ends with the bits of an undisturbed one, what was to be carried
to the shared place gets there, and nothing is left over.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stepwell.faults import OF_LEVELS, PARTS, POINTS
from stepwell.storage.format.checksum import BLOCK_BYTES
from tests.crash.harness import Process, wait_for
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Launch

SAMPLES, STEPS = 96, 36
ARGUMENTS = ("--samples", SAMPLES, "--epochs", 6)
LEADER = {"level.written", "level.linked", "flush.gathered"}
AGENTS = sorted(point for point in OF_LEVELS if POINTS[point].startswith("agent"))
SHORT = {
    ("agent", "copy.50", 1),
    ("all", "parity.written", 1),
    ("agent", "flush.gathered", 0),
}
"""Those that are played each time; the others are left to `make soak`."""


def scenes() -> list[Any]:
    found = []
    for point in AGENTS:
        for rank in (0,) if point in LEADER else (0, 2):
            for victim in ("agent", "all"):
                # Other ranks of the same points: each is played on the leader and on another one.
                case = (victim, point, 1 if rank and (victim, point, 1) in SHORT else rank)
                found.append(case if case in SHORT else soak(*case))
    return found


def make(make_job: MakeJob, protect: str) -> Cluster:
    job = make_job("job", "--sleep", 0.02, "--protect", protect, "--flush", 2, *ARGUMENTS, kind=Cluster)
    assert isinstance(job, Cluster)
    return job


def scheme(point: str) -> str:
    return "ReedSolomon(4, 2)" if point.startswith(("parity", "rebuild")) else "Pairs()"


def check(job: Cluster, reference: Cluster) -> None:
    assert job.ledger.problem(SAMPLES, 6) is None
    assert job.difference(reference) is None
    assert all(step > 0 for step in list(job.ledger.resumed().values())[1:]), "every restart resumed"
    assert job.flushed()[-1] == STEPS, job.flushed()
    job.check_nothing_left()


def at_point(mark: Path, job: Cluster, launch: Launch) -> Process:
    """The process that stands, or died, at the point."""
    job.wait_while_alive(launch, lambda: mark.exists() and mark.read_text(), "the point is reached")
    return Process(int(mark.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point", "rank"), scenes())
def test_a_death_at_a_point(
    victim: str, point: str, rank: int, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    job, mark, nth = make(make_job, scheme(point)), tmp_path / "mark", 1 if point.startswith("flush") else 2
    crash = f"agent!{point}:{rank}:{nth}{'' if victim == 'agent' else ':stop'}"
    launch = job.start("abcd", STEPWELL_CRASH=crash, STEPWELL_CRASH_MARK=str(mark))
    job.wait_while_alive(launch, mark.exists, "the point is reached")
    if victim == "all":
        process = at_point(mark, job, launch)
        wait_for(process.is_stopped, "it stands at the point")
        process.close()
        job.end_all(launch)
        launch = job.start("abcd")
    launch.wait_well()
    degraded = [event for event in job.events("degraded") if victim == "agent"]
    assert not degraded, degraded
    check(job, straight(4, *ARGUMENTS))


LARGE = ("--samples", 48, "--epochs", 4, "--width", 3800)
"""Shards of eleven blocks: their tenths lie in different ones."""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", ["copy", "parity", "flush"])
def test_a_death_within_a_large_shard(
    what: str, part: int, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    job = make_job("job", "--protect", scheme(what), "--flush", 2, *LARGE, kind=Cluster)
    assert isinstance(job, Cluster)
    mark = tmp_path / "mark"
    launch = job.start("abcd", STEPWELL_CRASH=f"agent!{what}.{part}:1:1", STEPWELL_CRASH_MARK=str(mark))
    job.wait_while_alive(launch, mark.exists, "the point is reached")
    launch.wait_well(300)
    shard = next(job.folder.glob("node.*/**/rank-00001.safetensors"))
    assert shard.stat().st_size > 10 * BLOCK_BYTES
    assert job.difference(straight(4, *LARGE)) is None
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["copy.50", soak("copy.files"), soak("parity.written")])
def test_the_agent_that_serves_dies_at_a_point_of_the_one_that_fetches(
    point: str, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    job, mark = make(make_job, scheme(point)), tmp_path / "mark"
    crash = {"STEPWELL_CRASH": f"agent!{point}:0:2:stop", "STEPWELL_CRASH_MARK": str(mark)}
    launch = job.start("abcd", **crash)
    process = at_point(mark, job, launch)
    wait_for(process.is_stopped, "it stands at the point")
    for rank in (1, 2, 3):
        job.kill_agents_of(rank)
    process.signal(signal.SIGCONT)
    process.close()
    launch.wait_well()
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "second"),
    [
        ("rebuild.computed", "survivor"),
        soak("rebuild.10", "none"),
        soak("rebuild.50", "survivor"),
        soak("rebuild.90", "survivor"),
        soak("copy.50", "none"),
        soak("copy.files", "survivor"),
        soak("copy.record.linked", "none"),
    ],
)
def test_a_rebuild_is_broken_off(
    point: str, second: str, make_job: MakeJob, straight: Straight, tmp_path: Path
) -> None:
    """The rank that makes a lost shard again dies, and with it another node; the next start has to do it again."""
    job, mark = make(make_job, "ReedSolomon(4, 2)"), tmp_path / "mark"
    launch = job.start("abcd")
    job.wait_committed(9, launch)
    job.end_all(launch)
    job.lose("b")
    step = job.newest_step()
    crash = {"STEPWELL_CRASH": f"trainer!{point}:1:1:stop", "STEPWELL_CRASH_MARK": str(mark)}
    launch = job.start("axcd", STEPWELL_GROUP_SECONDS="4", **crash)
    process = at_point(mark, job, launch)
    wait_for(process.is_stopped, "it stands at the point")
    process.close()
    job.end_all(launch)
    if second == "survivor":
        job.lose("c")
    job.start("axyd" if second == "survivor" else "axcd").wait_well()
    assert list(job.ledger.resumed().values())[1] >= step
    assert [event["source"] for event in job.events("restore")][-1] == "node"
    check(job, straight(4, *ARGUMENTS))
