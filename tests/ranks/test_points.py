"""SIGKILL of a rank, of its agent, or of both, at every named point, on the leader and on another rank of two.

Without its agent a rank trains on. Without a rank the other one fails, and all are started again. Either way the run
ends with the bits of an undisturbed one, and nothing is left over.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stepwell.faults import OF_CHAINS, OF_LEVELS, POINTS
from tests.crash.harness import Process, wait_for
from tests.ranks.conftest import MakeJob
from tests.ranks.test_odd import Odd

ALONE = {"record.renamed", "record.durable"}
"""Points that only the agent of a single rank passes."""
LEADER = {"lineage.linked", "spare.kept", "spare.taken", "records.gathered"}
"""Points that rank 0 passes for all, beside those of the manifest and of pruning."""
AT_START = {"lineage.linked", "restore.loaded"}
SHORT = {
    ("agent", "record.linked", 1),  # between record and manifest
    ("agent", "records.gathered", 0),
    ("both", "records.gathered", 0),
    ("agent", "void.linked", 0),
    ("agent", "void.written", 1),
    ("rank", "copy.middle", 1),
    ("rank", "shard.synced", 0),
    ("both", "record.written", 1),
}
"""Those that are played each time; the others are left to `make soak`."""
WISHES: dict[str, Any] = {"steps": 30, "pause": 0.02}


def scenes() -> list[Any]:
    found = []
    for point in [point for point in POINTS if point not in OF_LEVELS | OF_CHAINS | ALONE]:
        is_leader = point in LEADER or point.startswith(("manifest.", "prune."))
        for rank in (0,) if is_leader else (0, 1):
            victims = ["rank"] if point in AT_START else ["agent", "rank", "both"]
            for victim in victims:
                marks = [] if (victim, point, rank) in SHORT else [pytest.mark.soak]
                found.append(pytest.param(victim, point, rank, marks=marks, id=f"{victim}-{rank}-at-{point}"))
    return found


@pytest.fixture(scope="session")
def expected(server: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """How undisturbed runs end: one in which something becomes each rank's own on the way, and one in which not."""
    ends = {}
    for name, wishes in (("drift", {"drift": 5}), ("plain", {})):
        job = Odd(server, tmp_path_factory.mktemp("straight") / name)
        try:
            ends[name] = job.end(**WISHES, **wishes)
        finally:
            job.end_everything()
    return ends


@pytest.mark.parametrize(("victim", "point", "rank"), scenes())
def test_a_death_at_a_point(
    victim: str, point: str, rank: int, make_job: MakeJob, expected: dict[str, Any], tmp_path: Path
) -> None:
    patience = {"STEPWELL_GROUP_SECONDS": "4"} if point in AT_START else {}  # the others wait for it in the restore
    job = make_job("job", kind=Odd, **patience)
    assert isinstance(job, Odd)
    how = "drift" if point.startswith("void.") and rank == 0 else "plain"
    wishes = {**WISHES, **({"drift": 5} if how == "drift" else {})}
    if point == "restore.loaded":  # needs something to restore
        job.kill_at(8, tmp_path / "barrier", committed=6, **wishes)
    mark, owner = tmp_path / "mark", POINTS[point].partition(":")[0]
    is_at_point = victim == ("agent" if owner == "agent" else "rank")
    nth = 1 if point in AT_START or point.startswith("void.") else 2
    crash = {
        "STEPWELL_CRASH": f"{owner}!{point}:{rank}:{nth}{'' if is_at_point else ':stop'}",
        "STEPWELL_CRASH_MARK": str(mark),
    }
    if point.startswith("void.") and rank == 1:  # a write that fails, and a newer snapshot before it is tried again
        crash["STEPWELL_FAULT"] = "agent!fallocate:ENOSPC:2"
    launch = job.go(**wishes, each={rank: crash})
    wait_for(lambda: mark.exists() and mark.read_text(), "the point is reached")
    if not is_at_point:
        kill(job, victim, rank, Process(int(mark.read_text())))
    if victim == "agent":
        launch.wait_well(60)
    else:
        statuses = launch.wait(60)
        assert statuses[rank] == -signal.SIGKILL and 0 not in statuses, launch.logs()
        launch = job.go(**wishes)
        launch.wait_well(60)
    assert job.finals(launch) == expected[how]
    job.check_nothing_left()


def kill(job: Odd, victim: str, rank: int, at_point: Process) -> None:
    """The one at the point stands still; the victim is another one, or both are."""
    wait_for(at_point.is_stopped, "stopped at the point")
    if victim in ("rank", "both"):
        job.launches[-1].kill([rank])
    if victim in ("agent", "both"):
        job.kill_agents_of(rank)
    at_point.signal(signal.SIGCONT)
    at_point.close()
