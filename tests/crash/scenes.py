"""The crash scenes: somebody dies at a named point, and the run goes on from what is there.

One scene is (victim, point, nth). A process that is not at the point itself is caught by stopping the one that is:
it writes the mark and stops, the victim is killed, the stopped one goes on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell.faults import POINTS
from tests.crash.harness import Ending, Process, Run, wait_for

Victim = Literal["trainer", "agent", "both"]
AT_START = {"lineage.linked": 1, "restore.loaded": 1}
"""Points that a trainer passes once, when it starts."""


@dataclass(frozen=True)
class Scene:
    victim: Victim
    point: str
    nth: int

    @property
    def owner(self) -> str:
        """Which process passes the point."""
        return POINTS[self.point].partition(":")[0]

    def __str__(self) -> str:
        return f"{self.victim}-at-{self.point}-{self.nth}"


def play(scene: Scene, run: Run, mark: Path, reference: Ending, *, all_written: bool = True) -> None:
    """Run the scene to the end of training and check everything that must hold.

    all_written: every snapshot is for the disk
    """
    if scene.point == "restore.loaded":  # needs something to restore: an earlier death
        assert run.start(STEPWELL_CRASH="trainer!copy.complete:0:3").wait() == -signal.SIGKILL
        run.check_newest()
    if scene.victim == scene.owner:
        crash = f"{scene.owner}!{scene.point}:0:{scene.nth}"
    else:
        crash = f"{scene.owner}!{scene.point}:0:{scene.nth}:stop"
    # On a busy machine few checkpoints come about in a short run, and none is old enough to be removed.
    pace = {"TRAIN_PACE": "0.02"} if scene.point.startswith(("prune.", "spare.")) else {}
    trainer = run.start(STEPWELL_CRASH=crash, STEPWELL_CRASH_MARK=str(mark), **pace)
    at_point = _wait_for_mark(run, mark)
    if scene.victim == scene.owner:
        assert at_point.has_ended(60), f"{scene.point} was reached, and process {at_point.pid} lives"
    else:
        wait_for(at_point.is_stopped, "stopped at the point")
        _kill(scene, run)
    if scene.victim == "agent":
        at_point.signal(signal.SIGCONT)
        at_point.close()
        assert trainer.wait() == 0, trainer.log()  # training never stops
        deaths = run.events("agent-death")
        assert len(deaths) == 1, deaths
        if all_written:
            check_no_snapshot_lost(run)
    else:
        assert trainer.wait() == -signal.SIGKILL, trainer.log()
        if scene.owner == "agent":
            at_point.signal(signal.SIGCONT)  # it is an orphan now, or dead with its trainer
        at_point.close()
        if scene.victim == "both":
            assert not run.kill_agents()
        run.finish()
    run.check_identical(reference)
    run.check_nothing_left()


def _wait_for_mark(run: Run, mark: Path) -> Process:
    def reached() -> bool:
        trainer = run.trainers[-1]
        assert mark.exists() or not trainer.has_ended(), f"the point was never reached:\n{trainer.log()}"
        return mark.exists() and bool(mark.read_text())

    wait_for(reached, "the point is reached")
    pid = int(mark.read_text())
    try:
        return Process(pid)
    except ProcessLookupError:  # an agent that died here, and that its trainer has reaped
        return _Dead(pid)


class _Dead(Process):
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def has_ended(self, seconds: float = 0.0) -> bool:
        return True

    def close(self) -> None:
        pass


def _kill(scene: Scene, run: Run) -> None:
    """Kill those that are not at the point (for `both`: all)."""
    if scene.victim in ("trainer", "both"):
        assert run.trainers[-1].kill()
    if scene.victim in ("agent", "both"):
        killed = run.kill_agents()
        # Before its trainer has a lineage there is no agent; one from an earlier trainer may linger.
        assert killed == 1 or scene.point in AT_START, killed


def check_no_snapshot_lost(run: Run) -> None:
    """Whatever was complete in memory was committed."""
    complete = {event["step"] for event in run.events("snapshot")}
    committed = {event["step"] for event in run.events("commit")}
    assert complete <= committed, f"complete, but never committed: {sorted(complete - committed)}"
