"""Agents that are frozen, die again and again, or cannot be started: nothing waits for ever, and nothing ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepwell.handover import agent_deaths, client, spawn
from stepwell.handover.agent_deaths import Deaths
from stepwell.handover.protocol import Durable, Released, WriteFailed
from tests.agent.puppet import Puppet, verify, wait_for


@pytest.fixture
def puppet(run_dir: Path) -> Puppet:
    return Puppet(run_dir)


def test_an_agent_that_is_frozen_is_replaced(puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puppet.client, "_silent_seconds", 1.0)
    puppet.start()
    assert isinstance(puppet.save(1), Durable)
    frozen = puppet.client.pid
    os.kill(frozen, signal.SIGSTOP)
    assert isinstance(puppet.save(2), Durable)
    assert puppet.client.pid != frozen
    assert puppet.close() and puppet.steps() == [2, 1]


def test_an_agent_that_is_frozen_at_the_end_is_replaced(puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LEAST_SILENT_SECONDS", 1.0)
    puppet.start()
    os.kill(puppet.client.pid, signal.SIGSTOP)
    puppet.complete(1, 1, puppet.begin(1, 1))
    assert puppet.close(seconds=2.0)
    assert puppet.steps() == [1]


def test_an_agent_that_still_writes_after_a_close_that_timed_out_is_left_alone(
    puppet: Puppet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_CRASH", "agent!shard.written:0:1:stop")
    monkeypatch.setenv("STEPWELL_CRASH_MARK", str(tmp_path / "mark"))
    monkeypatch.setattr(client, "_END_SECONDS", 0.1)
    puppet.start()
    puppet.complete(1, 1, puppet.begin(1, 1))
    wait_for((tmp_path / "mark").exists, "stopped")
    agent, process = puppet.client.pid, puppet.client._process
    assert process is not None and not puppet.close(seconds=0.1)
    assert puppet.client.pid == agent and not puppet.events("agent-death") and process.poll() is None
    os.kill(agent, signal.SIGCONT)
    assert process.wait(30) == 0
    assert puppet.steps() == [1]
    verify(puppet.paths, puppet.good()[0])


def test_no_descriptors_while_an_agent_dies_is_no_end(puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    make, refused = socket.socketpair, []

    def refuse_twice(*given: Any) -> Any:
        if len(refused) < 2:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*given)

    puppet.start()
    monkeypatch.setattr(spawn.socket, "socketpair", refuse_twice)
    os.kill(puppet.client.pid, signal.SIGKILL)
    assert isinstance(puppet.save(1), Durable)
    assert len(refused) == 2 and puppet.close()


def test_the_death_of_an_agent_is_seen_though_a_fork_holds_its_socket(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loader worker that was forked at the moment in which the agent was started."""
    popen, held = subprocess.Popen, []

    def start_and_hold(*given: Any, **more: Any) -> Any:
        held.append(os.dup(more["pass_fds"][0]))
        return popen(*given, **more)

    monkeypatch.setattr(spawn.subprocess, "Popen", start_and_hold)
    puppet.start()
    os.kill(puppet.client.pid, signal.SIGKILL)
    assert isinstance(puppet.save(1), Durable)
    assert puppet.close()
    for fd in held:
        os.close(fd)


def test_agents_that_die_again_and_again_give_a_snapshot_up_and_the_next_one_is_written(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_CRASH", "agent!persist.begin:0:1")  # no mark: every agent dies there
    monkeypatch.setattr(agent_deaths, "_FIRST_PAUSE", 0.01)
    puppet.start()
    first = puppet.begin(1, 1)
    puppet.complete(1, 1, first)
    failure = puppet.wait(WriteFailed, sequence=first)
    assert isinstance(failure, WriteFailed) and "died 6 times" in failure.error
    puppet.wait(Released, sequence=first)
    monkeypatch.delenv("STEPWELL_CRASH")
    wait_for(lambda: len(puppet.events("agent-death")) == 6, "another agent")
    (failing,) = puppet.events("agents-fail")
    assert (failing["deaths"], failing["given_up"]) == (6, 1)
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close() and puppet.steps() == [2]


def test_agents_that_die_while_a_run_ends_do_not_hold_the_end_up(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_CRASH", "agent!persist.begin:0:1")
    monkeypatch.setattr(agent_deaths, "_FIRST_PAUSE", 3600.0)
    puppet.start()
    puppet.complete(1, 1, puppet.begin(1, 1))
    puppet.close(seconds=600.0)
    assert not puppet.good()


def test_pauses_grow_and_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Deaths()
    pauses = [times.note() for _ in range(20)]
    assert pauses[:5] == [0.0] * 5
    assert pauses[5:8] == [5.0, 10.0, 20.0] and max(pauses) == pauses[-1] == 300.0
    times.note_durable()
    assert times.note() == 0.0
