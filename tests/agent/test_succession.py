"""A trainer that dies at any moment of taking an agent over leaves an agent that another one can take over."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.agent import callers
from stepwell.agent.process import Agent
from stepwell.handover.channel import Channel
from stepwell.handover.find_agents import find_orphan
from stepwell.handover.memory import Arena, ArenaShape
from stepwell.handover.protocol import Durable, NewArena, Offer, Ready
from tests.agent.puppet import Puppet, here, make_orphan, verify, wait_for

Pair = tuple[Agent, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An agent in this process, and its trainer's end."""
    ours, theirs = socket.socketpair()
    agent, trainer = Agent(Channel(theirs)), Channel(ours)
    agent._selector.register(theirs, 1, agent._on_trainer)
    yield agent, trainer
    for arena in agent.arenas.values():
        arena.close()
    ours.close()
    theirs.close()


def dead_pid() -> int:
    """Of a process that is gone and reaped."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_trainer_that_dies_before_its_hello_is_read_leaves_no_traceback(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    puppet = Puppet(run_dir)
    puppet.open()
    puppet.client.launch()
    process, channel = puppet.client._process, puppet.client._channel
    assert process is not None and channel is not None
    channel.send(replace(puppet.hello(), pid=dead_pid()))
    channel.close()
    assert process.wait(30) == 0
    puppet.log.close()
    assert "Traceback" not in capfd.readouterr().err


def test_what_an_agent_holds_outlives_a_successor_that_dies_before_its_hello_is_read(run_dir: Path) -> None:
    agent = make_orphan(run_dir, linger=30, scene="newest_in_memory")
    found = find_orphan(here(run_dir), 0)
    assert found is not None
    puppet = Puppet(run_dir, linger=30)
    puppet.open(parent=1, step=3)
    found[0].send(replace(puppet.hello(), pid=dead_pid()))
    found[0].close()
    for fd in found[2]:
        os.close(fd)
    again = wait_for(lambda: find_orphan(here(run_dir), 0), "it waits for another one")
    assert again[1].agent == agent
    assert [item.slot for item in again[1].snapshots] == [item.slot for item in found[1].snapshots]
    assert len(again[2]) == 1
    puppet.client.adopt(*again)
    puppet.start(parent=2, step=3)
    assert puppet.client.pid == agent
    assert isinstance(puppet.save(4), Durable)
    assert puppet.close()
    for entry in puppet.good():
        verify(puppet.paths, entry)


def test_two_arenas_on_their_way_at_the_death_of_the_trainer_both_arrive(pair: Pair) -> None:
    agent, trainer = pair
    for generation in (1, 2):
        arena = Arena.allocate(ArenaShape(generation, 2, 4096, 0))
        trainer.send(NewArena(**vars(arena.shape)), [arena.fd])
        arena.close()
    assert agent.channel is not None
    agent._drain(agent.channel)
    assert sorted(agent.arenas) == [1, 2]


def test_an_agent_that_is_taken_over_waits_as_long_as_its_new_trainer_lives(pair: Pair) -> None:
    """Many ranks may wait for each other before one of them says hello, for longer than an agent without a trainer."""
    agent, _ = pair
    agent.linger_seconds, agent._leave_at = 0.0, 0.0  # long ago
    ours, theirs = socket.socketpair()
    agent._hand_over(Channel(theirs), os.getpid(), Offer(os.getpid()), [])
    assert not agent._is_over()
    ours.close()
    wait_for(lambda: agent._selector.select(0), "it hung up")
    agent._on_trainer()
    assert agent._leave_at is not None and agent._is_over()  # the control: it did not want the agent
    assert not agent.trainer.is_there
    theirs.close()


def test_a_successor_that_is_killed_without_a_hello_leaves_the_agent_to_the_next(run_dir: Path) -> None:
    agent = make_orphan(run_dir, linger=30)
    code = (
        "import sys, time; from stepwell.handover.find_agents import find_orphan; found = find_orphan(sys.argv[1], 0); "
    )
    code += "print(found is not None, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, here(run_dir)], stdout=subprocess.PIPE) as successor:
        assert successor.stdout is not None and successor.stdout.readline() == b"True\n"
        successor.send_signal(signal.SIGKILL)
    puppet = Puppet(run_dir)
    found = wait_for(lambda: find_orphan(here(run_dir), 0), "it waits for another one")
    assert found[1].agent == agent
    puppet.client.adopt(*found)
    puppet.start(parent=1, step=1)
    assert puppet.close()


@pytest.mark.parametrize("why", ["taken", "unknown"])
def test_an_agent_that_cannot_listen_goes_on_without(
    run_dir: Path, pair: Pair, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has its name, or there is no secret to make one with: only adoption is lost."""

    def refuse(where: str, rank: int) -> socket.socket:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(callers, "listen", refuse)
    agent, trainer = pair
    puppet = Puppet(run_dir, linger=60)
    puppet.open()
    hello = puppet.hello()
    agent._do_hello(hello if why == "taken" else replace(hello, agents=""))
    said = trainer.receive()
    assert said is not None and isinstance(said[0], Ready)
    assert agent.linger_seconds == 0.0, "it does not wait for who cannot come"
    assert ("cannot listen for the next trainer" in caplog.text) is (why == "taken")
    agent.worker.persister.close()
    puppet.log.close()
