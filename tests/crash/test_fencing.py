"""A trainer that was frozen while a successor went on cannot change, commit or prune anything of the successor's.

The frozen pair stands at a named point of its commit or prune, so that what it does first when it thaws is the very
next file operation there.
"""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from stepwell.storage.store.lineage import read_history
from tests.crash.harness import Ending, Process, Run, wait_for

Listing = dict[str, tuple[int, int, int, str]]


def listing(root: Path, lineages: set[int]) -> Listing:
    """Everything of these lineages: inode, size, time of change and digest of every file."""
    found = {}
    for lineage in lineages:
        folders = [*root.glob(f"step-*.l{lineage:04d}*"), root / "lineage"]
        for path in (path for folder in folders for path in folder.rglob("*")):
            if path.parent.name == "lineage" and path.name != f"{lineage:04d}.json":
                continue
            stat = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(root))] = (stat.st_ino, stat.st_size, stat.st_mtime_ns, digest)
    return found


def freeze(run: Run, point: str, mark: Path) -> tuple[Process, Process]:
    """Start a trainer whose agent stops at a point, and stop the trainer too. Returns both."""
    # Not so fast that an agent that is held up could leave out too many checkpoints to come to the point three times.
    trainer = run.start(STEPWELL_CRASH=f"agent!{point}:0:3:stop", STEPWELL_CRASH_MARK=str(mark), TRAIN_PACE="0.05")
    wait_for(lambda: mark.exists() and mark.read_text(), "the agent reaches the point")
    agent = Process(int(mark.read_text()))
    trainer.signal(signal.SIGSTOP)
    for process in (trainer, agent):
        wait_for(process.is_stopped, "stopped")
    return trainer, agent


def thaw(run: Run, agent: Process) -> None:
    """Let the frozen pair go on to its end."""
    for process in (agent, run.trainers[0]):
        process.signal(signal.SIGCONT)
    run.trainers[0].wait()
    agent.close()


@pytest.mark.parametrize(
    "point", ["persist.begin", "shard.synced", "record.durable", "manifest.written", "prune.begin"]
)
def test_a_frozen_pair_cannot_touch_its_successor(point: str, run: Run, tmp_path: Path, reference: Ending) -> None:
    _, agent = freeze(run, point, tmp_path / "mark")
    assert read_history(run.paths).newest == 1
    run.finish()
    before = listing(run.paths.root, {2})
    thaw(run, agent)
    old = run.trainers[0]
    assert old.wait() == 1 and "PersistError" in old.log(), old.log()  # told at its end that nothing was saved
    fenced = run.events("fenced")
    assert fenced and all((event["lineage"], event["newest"]) == (1, 2) for event in fenced)
    assert before and listing(run.paths.root, {2}) == before
    run.wait_gone()
    run.check_identical(reference)


def test_a_pair_that_thaws_while_its_successor_trains(run: Run, tmp_path: Path, reference: Ending) -> None:
    _, agent = freeze(run, "record.durable", tmp_path / "mark")
    successor = run.start(TRAIN_END="wait")
    run.wait_paused()
    wait_for(lambda: len([entry for entry in run.good() if entry.id.lineage == 2]) == 2, "the successor pruned")
    kept = {entry.id for entry in run.good()}
    thaw(run, agent)
    assert run.events("fenced")
    assert {entry.id for entry in run.good()} == kept
    step = run.check_newest()
    successor.kill()
    successor.wait()
    run.finish()
    began = run.opening(run.trainers[-1])
    assert began is not None and began["step"] >= step
    run.check_identical(reference)
    run.check_nothing_left()


def test_a_frozen_trainer_with_a_live_agent(run: Run, tmp_path: Path, reference: Ending) -> None:
    """Only the trainer freezes: its agent commits what is complete, refuses to be adopted, and is fenced later."""
    crash = {"STEPWELL_CRASH": "trainer!copy.complete:0:4:stop", "STEPWELL_CRASH_MARK": str(tmp_path / "mark")}
    trainer = run.start(**crash, TRAIN_PACE="0.05")  # not so fast that the fourth snapshot could be the last one
    wait_for(trainer.is_stopped, "the trainer is stopped")
    wait_for(lambda: len(run.events("commit")) == 4, "its agent commits what is complete")
    run.finish()
    said = f"Resuming from disk instead of memory: another Checkpointer (process {trainer.pid}) still uses this run"
    assert said in trainer.log()
    before = listing(run.paths.root, {2})
    trainer.signal(signal.SIGCONT)
    assert trainer.wait() == 1 and "PersistError" in trainer.log(), trainer.log()
    assert run.events("fenced")
    assert before and listing(run.paths.root, {2}) == before
    run.wait_gone()
    run.check_identical(reference)


def test_two_trainers_at_once_get_different_lineages(run: Run, reference: Ending) -> None:
    """The later lineage ends well; the other one is told that it lost, and spoils nothing."""
    trainers = [run.start(), run.start()]
    statuses = {trainer.pid: trainer.wait() for trainer in trainers}
    lineages = {event["process"]: event["lineage"] for event in run.events("start")}
    assert sorted(lineages.values()) == [1, 2]
    winner = next(pid for pid, lineage in lineages.items() if lineage == 2)
    assert statuses.pop(winner) == 0, trainers[0].log()
    if statuses.popitem()[1]:  # it may have been through before the other one came
        assert run.events("fenced")
    run.wait_gone()
    entry = run.newest()
    assert entry is not None and entry.id.lineage == 2
    run.check_identical(reference)


def test_control_without_the_lineage_the_frozen_pair_commits(run: Run, tmp_path: Path, reference: Ending) -> None:
    """The same scene, but the successor's lineage is gone when the pair thaws: nothing holds it back."""
    _, agent = freeze(run, "persist.begin", tmp_path / "mark")
    run.finish()
    run.paths.lineage(2).unlink()
    thaw(run, agent)
    assert run.trainers[0].wait() == 0, run.trainers[0].log()
    assert not run.events("fenced")
    entry = run.newest()
    assert entry is not None and entry.id.lineage == 1 and entry.id.step == reference.step
    run.wait_gone()
