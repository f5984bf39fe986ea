"""The agent outlives its trainer: what was complete in memory becomes durable, and a successor takes it from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.handover.agent_address import find_agents
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.agent.puppet import here
from tests.crash.harness import Ending, Run, children, wait_for
from tests.ranks.conftest import soak

NTH = 3


def kill_after_snapshot(run: Run) -> None:
    """The trainer dies in the moment when its third snapshot is complete in memory."""
    assert run.start(STEPWELL_CRASH=f"trainer!copy.complete:0:{NTH}").wait() == -signal.SIGKILL


def wait_for_the_third(run: Run) -> int:
    """Until the agent has committed all three, alone. Returns the step of the last."""
    wait_for(lambda: len(run.events("commit")) == NTH, "the agent commits alone")
    step: int = run.events("commit")[-1]["step"]
    return step


def test_a_complete_snapshot_becomes_durable_without_its_trainer(run: Run) -> None:
    kill_after_snapshot(run)
    assert run.check_newest() <= wait_for_the_third(run) == run.check_newest()
    (death,) = wait_for(lambda: run.events("trainer-death"), "the agent says that its trainer is dead")
    assert death["pid"] == run.trainers[0].pid


def test_a_successor_restores_it_from_memory(run: Run, reference: Ending) -> None:
    kill_after_snapshot(run)
    (agent,) = run.agents()
    run.finish()
    began = run.opening(run.trainers[1])
    third = run.events("commit")[NTH - 1]["step"]
    assert began is not None and (began["step"], began["source"]) == (third, "memory")
    (adopted,) = run.events("adopted")
    assert adopted["process"] == agent.pid and adopted["pid"] == run.trainers[1].pid
    agent.close()
    run.check_identical(reference)
    run.check_nothing_left()


def test_without_the_agent_it_is_restored_from_disk(run: Run, reference: Ending) -> None:
    kill_after_snapshot(run)
    step = wait_for_the_third(run)
    assert run.kill_agents() == 1
    run.finish()
    began = run.opening(run.trainers[1])
    assert began is not None and (began["step"], began["source"]) == (step, "disk")
    run.check_identical(reference)
    run.check_nothing_left()


def test_control_when_both_die_at_once_the_snapshot_is_lost(run: Run, tmp_path: Path, reference: Ending) -> None:
    """The memory is what carries it: without the agent the run goes on from the checkpoint before."""
    mark = str(tmp_path / "mark")
    trainer = run.start(STEPWELL_CRASH=f"agent!persist.begin:0:{NTH}:stop", STEPWELL_CRASH_MARK=mark)
    agent = run.agent()
    wait_for(agent.is_stopped, "the third is complete, in memory only")
    trainer.kill()
    trainer.wait()
    assert run.kill_agents() == 1
    agent.close()
    step = run.check_newest()
    assert step == run.events("commit")[NTH - 2]["step"]
    run.finish()
    began = run.opening(run.trainers[1])
    assert began is not None and (began["step"], began["source"]) == (step, "disk")
    run.check_identical(reference)


def test_a_lingering_agent_leaves_when_nobody_comes(run: Run) -> None:
    trainer = run.start(STEPWELL_CRASH=f"trainer!copy.complete:0:{NTH}", STEPWELL_LINGER="0.3")
    assert trainer.wait() == -signal.SIGKILL
    run.wait_gone()
    assert run.check_newest() == wait_for_the_third(run)


def test_loader_workers_do_not_hide_the_death_of_the_trainer(run: Run) -> None:
    """They inherit the socket, so that its end comes late; the agent watches the process itself."""
    trainer = run.start(TRAIN_WORKERS="2", TRAIN_END="wait")
    run.wait_paused()
    workers = children(trainer.pid)
    for worker in workers:
        worker.signal(signal.SIGSTOP)  # they cannot notice, so they stay and hold what they inherited
    trainer.kill()
    try:
        wait_for(lambda: run.events("trainer-death"), "the agent sees it")
        assert all(not worker.has_ended() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.close()
    assert len(workers) == 2


SAVE_AND_DIE = """
import os, signal, sys, torch, stepwell
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
ckpt = stepwell.Checkpointer(sys.argv[1], policy=stepwell.Never(), model=model, optimizer=optimizer)
ckpt.restore()
for _ in range(3):
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    handle = ckpt.save()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("number", [0, soak(1), soak(2)])
def test_killed_in_the_moment_save_returned(number: int, run_dir: Path) -> None:
    """On the CPU `save()` returns when the copy is complete, so its checkpoint becomes durable whatever comes next."""
    ended = subprocess.run(
        [sys.executable, "-c", SAVE_AND_DIE, str(run_dir)], env={**os.environ, "STEPWELL_LINGER": "1"}
    )
    assert ended.returncode == -signal.SIGKILL
    wait_for(
        lambda: [entry.id.step for entry in scan(RunPaths(run_dir)) if entry.is_good][:1] == [3], "step 3 is durable"
    )
    wait_for(lambda: not find_agents(here(run_dir), 0), "the agent ends")
