"""memory=Every(steps=1): a copy of every step outlives the trainer, in memory at once and on disk soon after."""

from __future__ import annotations

import itertools
import signal

import pytest

from stepwell.storage.store.progress import read_progress
from stepwell.types import Keep
from tests.crash.harness import Ending, Run, wait_for

RARELY = {"TRAIN_EVERY": "1000", "TRAIN_IN_MEMORY": "1"}
NTH = 9


def kill_after_the_ninth(run: Run) -> None:
    """The trainer dies when its ninth snapshot is complete; none was written so far."""
    trainer = run.start(STEPWELL_CRASH=f"trainer!copy.complete:0:{NTH}", **RARELY)
    assert trainer.wait() == -signal.SIGKILL


def test_a_kill_loses_no_finished_step(run: Run, reference: Ending) -> None:
    """The successor takes the newest step from memory; the disk has it too, although nobody asked for a checkpoint."""
    kill_after_the_ninth(run)
    wait_for(lambda: run.events("commit"), "the agent writes the newest one, alone")
    (commit,) = run.events("commit")
    assert commit["step"] == run.check_newest() >= NTH
    noted = read_progress(run.paths.progress)  # by a thread, which may have been killed before its last note
    run.finish()
    began = run.opening(run.trainers[1])
    assert began is not None and (began["step"], began["source"]) == (commit["step"], "memory")
    assert noted is not None and noted.step <= commit["step"]
    assert began["redone"] == (0 if noted.step == commit["step"] else None)
    run.check_identical(reference)
    run.check_nothing_left()


def test_without_the_agent_the_disk_has_it(run: Run, reference: Ending) -> None:
    kill_after_the_ninth(run)
    wait_for(lambda: run.events("commit"), "the agent writes the newest one, alone")
    run.kill_agents()
    run.finish()
    began = run.opening(run.trainers[1])
    assert began is not None and began["source"] == "disk" and began["step"] >= NTH
    run.check_identical(reference)


def test_an_uninterrupted_run_writes_only_its_end(run: Run, reference: Ending) -> None:
    assert run.start(**RARELY).wait() == 0
    run.wait_gone()
    assert [event["step"] for event in run.events("commit")] == [reference.step]
    steps = [event["step"] for event in run.events("snapshot")]
    assert len(set(steps)) > reference.step // 2  # the arena is not ready for the first few
    run.check_identical(reference)
    run.check_nothing_left()


@pytest.mark.parametrize("every", ["3", "7"])
def test_checkpoints_between_them_are_written_as_without(every: str, run: Run, reference: Ending) -> None:
    assert run.start(TRAIN_EVERY=every, TRAIN_IN_MEMORY="1", TRAIN_PACE="0.05").wait() == 0
    run.wait_gone()
    written = [event["step"] for event in run.events("commit")]
    assert len(written) > 3 and len(run.good()) >= Keep().last
    gaps = [later - step for step, later in itertools.pairwise(written[:-1])]
    assert all(gap >= int(every) for gap in gaps)  # more where storage did not keep up, never less
    run.check_identical(reference)
    run.check_nothing_left()


def test_an_agent_that_dies_is_told_again(run: Run, reference: Ending) -> None:
    trainer = run.start(TRAIN_PACE="0.02", **RARELY)
    agent = run.agent()
    wait_for(lambda: len(run.events("snapshot")) > 3, "some are in memory")
    agent.kill()
    agent.close()
    wait_for(lambda: run.events("agent-death"), "another agent")
    trainer.kill()
    trainer.wait()
    wait_for(lambda: run.events("commit"), "the new agent writes the newest one, alone")
    run.finish()
    run.check_identical(reference)
    run.check_nothing_left()
