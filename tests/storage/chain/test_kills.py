"""SIGKILL of trainer, agent, or both, in a run with chains: what is exact stays exact, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import get_args

import pytest

from stepwell.faults import OF_CHAINS
from stepwell.restore.from_chain import find_chains
from stepwell.storage.store.progress import read_progress
from tests.crash.harness import Ending, Run, wait_for
from tests.crash.scenes import Scene, Victim, play

SLOW = {"TRAIN_PACE": "0.1"}
"""A busy machine needs a while for the first base."""
SHORT = ("both-at-chain.appended-3", "both-at-chain.writing-3", "agent-at-chain.begin-3", "trainer-at-chain.appended-3")


def scenes() -> list[object]:
    found = [Scene(victim, point, nth) for point in sorted(OF_CHAINS) for victim in get_args(Victim) for nth in (1, 3)]
    marks = [[] if str(scene) in SHORT else [pytest.mark.soak] for scene in found]
    return [pytest.param(scene, marks=mark, id=str(scene)) for scene, mark in zip(found, marks, strict=True)]


@pytest.mark.parametrize("scene", scenes())
def test_a_death_at_a_point(scene: Scene, run: Run, tmp_path: Path, reference: Ending) -> None:
    """Restarts take what is exact: the run ends with the same bits."""
    play(scene, run, tmp_path / "mark", reference, all_written=False)


def test_an_uninterrupted_run_is_not_disturbed(run: Run, reference: Ending) -> None:
    assert run.start(**SLOW).wait() == 0
    run.wait_gone()
    assert len(run.events("delta")) > reference.step // 2
    run.check_identical(reference)
    run.check_nothing_left()


def test_a_trainer_alone_loses_nothing(run: Run, reference: Ending) -> None:
    """Its agent still has the newest snapshot, exact; the chain is not needed."""
    trainer = run.start(**SLOW)
    wait_for(lambda: len(run.events("delta")) > 8, "records")
    trainer.kill()
    trainer.wait()
    noted = read_progress(run.paths.progress)  # by a thread, which may have been killed before its last note
    run.finish()
    began = run.opening(run.trainers[1])
    assert began is not None and began["source"] == "memory"
    assert noted is not None and noted.step <= began["step"]
    assert began["redone"] == (0 if noted.step == began["step"] else None)
    run.check_identical(reference)


def test_a_machine_loses_what_was_on_its_way(run: Run, reference: Ending) -> None:
    """Both processes die; the next start goes on from the newest record, and the run comes to its end."""
    trainer = run.start(TRAIN_EVERY="1000", **SLOW)
    wait_for(lambda: len(run.events("delta")) > 12, "records")
    agents = run.agents()
    for process in (*agents, trainer):
        process.signal(signal.SIGSTOP)  # at once, as a machine does
    for process in (*agents, trainer):
        process.kill()
    assert trainer.wait() == -signal.SIGKILL
    for agent in agents:
        assert agent.has_ended(60)
    done = run.events("snapshot")[-1]["step"]
    written = max(item.step for chain in find_chains(run.paths) for item in chain.records)
    assert written >= done - 2, "what was copied is written, but for one that is coded and one that waits for that"
    assert run.start(TRAIN_PREFER="newest").wait() == 0, run.trainers[1].log()
    run.wait_gone()
    began = run.opening(run.trainers[1])
    assert began is not None and (began["source"], began["step"]) == ("chain", written)
    assert run.events("lossy")[-1]["step"] == written
    assert run.ending().step == reference.step
    run.check_nothing_left()
