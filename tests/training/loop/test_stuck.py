"""The end of a run has an end, whatever its agent does."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

import stepwell
from stepwell.errors import PersistError, StateError
from stepwell.handover import client
from stepwell.training.loop.mailbox import Again, WantAgain
from stepwell.training.loop.save import Saving
from tests.agent.puppet import wait_for
from tests.training.loop.pair import make, update


@pytest.fixture
def frozen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> stepwell.Checkpointer:
    """A run of which two snapshots wait for an agent that is frozen: there is no slot for a third one."""
    monkeypatch.setenv("STEPWELL_CLOSE_SECONDS", "1")
    monkeypatch.setattr(client, "_END_SECONDS", 0.1)
    monkeypatch.setattr(client, "_LEAST_SILENT_SECONDS", 600.0)  # or another one would do its work
    ckpt, model, optimizer = make(run_dir)
    update(model, optimizer)
    ckpt.step()
    ckpt.save().wait(30)
    wait_for(lambda: not ckpt._snapshotter.pool.busy(), "the slot is free")
    os.kill(ckpt.status().agent_pid, signal.SIGSTOP)
    for _ in range(2):
        update(model, optimizer)
        ckpt.step()
        ckpt.save()
    update(model, optimizer)
    ckpt.step()
    return ckpt


def end(ckpt: stepwell.Checkpointer, agent: int) -> None:
    with pytest.raises(PersistError):
        ckpt.close()
    os.kill(agent, signal.SIGCONT)


def test_a_frozen_agent_does_not_hold_the_end_up(frozen: stepwell.Checkpointer) -> None:
    agent = frozen.status().agent_pid
    with pytest.raises(PersistError, match="2 snapshots did not become durable") as failure:
        frozen.close()
    assert "no memory for a snapshot became free within 1 s" in str(failure.value.__context__)
    assert agent == frozen.status().agent_pid
    os.kill(agent, signal.SIGCONT)


def test_a_save_that_finds_no_slot_is_an_error(frozen: stepwell.Checkpointer) -> None:
    frozen._snapshotter.patience = 0.5
    with pytest.raises(PersistError, match="no memory for a snapshot became free"):
        frozen.save()
    end(frozen, frozen.status().agent_pid)


def test_what_another_thread_wants_while_a_save_fails_is_not_lost(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, model, optimizer = make(run_dir)
    update(model, optimizer)
    ckpt.step()

    def fail(self: Saving, *given: object, **more: object) -> None:
        self.outcomes.mailbox.post(WantAgain(Again.VOID))  # as the copier does, when the snapshot before turns out void
        raise StateError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "_begin", fail)
        with pytest.raises(StateError):
            ckpt.save()
    ckpt._outcomes.collect()
    assert Again.VOID in ckpt._outcomes.again
    ckpt.close()


def test_a_save_is_decided_though_nobody_could_note_what_became_of_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, model, optimizer = make(run_dir)
    update(model, optimizer)
    ckpt.step()

    def fail(inflight: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(ckpt._snapshotter, "_on_settled", fail)
    with caplog.at_level(logging.ERROR):
        assert isinstance(ckpt.save().staging_completion.exception(30), MemoryError)
    assert "cannot note the outcome" in caplog.text
    monkeypatch.undo()
    ckpt.close()
