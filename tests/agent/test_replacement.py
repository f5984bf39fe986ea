"""An agent that dies is replaced, and no complete snapshot is lost, whatever it was doing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from stepwell.agent import offer, process
from stepwell.errors import AgentError, VoidError
from stepwell.handover.channel import Channel
from stepwell.handover.client import AgentClient
from stepwell.handover.find_agents import find_orphan
from stepwell.handover.protocol import PROTOCOL, Adopt, Durable, NoOffer, NoPart, Offer, Released
from stepwell.storage.store import assemble
from stepwell.types import CheckpointId
from tests.agent.puppet import Puppet, here, make_orphan, verify, wait_for


def stop_at(point: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first agent stops at this point; its replacement does not."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("STEPWELL_CRASH", f"agent!{point}:0:{nth}:stop")
    monkeypatch.setenv("STEPWELL_CRASH_MARK", str(mark))
    return mark


def test_a_killed_agent_is_replaced_and_told_what_is_not_durable(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = stop_at("shard.written", 2, tmp_path, monkeypatch)
    puppet = Puppet(run_dir)
    puppet.start()
    puppet.wait(Released, sequence=puppet.save(1).sequence)
    second = puppet.begin(2, 0)
    puppet.complete(2, 0, second)
    third = puppet.begin(3, 1)
    puppet.complete(3, 1, third)
    wait_for(mark.exists, "stopped")
    old = puppet.client.pid
    os.kill(old, signal.SIGKILL)
    for sequence in (second, third):
        puppet.wait(Durable, sequence=sequence)
    (death,) = puppet.events("agent-death")
    assert (death["pid"], death["status"], death["resent"]) == (old, "exit status -9", 2)
    assert puppet.client.pid != old
    assert puppet.close()
    assert puppet.steps() == [3, 2]
    for entry in puppet.good():
        verify(puppet.paths, entry)


def test_a_snapshot_in_an_older_arena_is_not_lost(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state changed its layout while the snapshot was on its way: the new agent needs the old arena too."""
    mark = stop_at("persist.begin", 2, tmp_path, monkeypatch)
    puppet = Puppet(run_dir)
    puppet.start()
    assert isinstance(puppet.save(1), Durable)
    sequence = puppet.begin(2, 0)
    puppet.complete(2, 0, sequence)
    wait_for(mark.exists, "stopped")
    old = puppet.arena
    puppet.prepare()
    old.close()  # as the trainer does
    os.kill(puppet.client.pid, signal.SIGKILL)
    puppet.wait(Durable, sequence=sequence)
    assert isinstance(puppet.save(3), Durable)
    assert len(puppet.events("agent-death")) == 1
    assert puppet.close()
    assert puppet.steps() == [3, 2]
    for entry in puppet.good():
        verify(puppet.paths, entry)


def test_an_agent_killed_while_closing_is_replaced_too(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = stop_at("shard.synced", 1, tmp_path, monkeypatch)
    puppet = Puppet(run_dir)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.complete(1, 0, sequence)
    wait_for(mark.exists, "stopped")
    pid, finished = puppet.client.pid, []
    closing = threading.Thread(target=lambda: finished.append(puppet.close()))
    closing.start()
    wait_for(lambda: puppet.client._closing is not None, "closing")
    os.kill(pid, signal.SIGKILL)
    closing.join()
    assert finished == [True]
    assert puppet.steps() == [1]
    verify(puppet.paths, puppet.good()[0])


def test_a_word_to_the_other_ranks_outlives_an_agent_that_is_killed_while_closing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot is on its way any more, but the other ranks wait for this rank's part, or for the word."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("STEPWELL_CRASH", "agent!void.written:1:1:stop")
    monkeypatch.setenv("STEPWELL_CRASH_MARK", str(mark))
    puppet = Puppet(run_dir)
    puppet.open()
    puppet.client.start(replace(puppet.hello(), rank=1, world_size=2), puppet._on_message)
    puppet.prepare()
    puppet.client.say_void(NoPart(3, 0, "refused"))
    wait_for(mark.exists, "stopped")
    pid, finished = puppet.client.pid, []
    closing = threading.Thread(target=lambda: finished.append(puppet.close()))
    closing.start()
    wait_for(lambda: puppet.client._closing is not None, "closing")
    os.kill(pid, signal.SIGKILL)
    closing.join()
    assert finished == [True]
    with pytest.raises(VoidError, match="rank 1: refused"):
        assemble.gather(puppet.paths, CheckpointId(3, 0, puppet.lineage), 2)


def test_an_agent_killed_at_its_start_is_started_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greet = AgentClient._greet
    killed = []

    def kill_first(client: AgentClient) -> None:
        if not killed:
            killed.append(client.pid)
            os.kill(client.pid, signal.SIGKILL)
        greet(client)

    monkeypatch.setattr(AgentClient, "_greet", kill_first)
    puppet = Puppet(run_dir)
    puppet.start()
    assert puppet.client.pid != killed[0]
    assert isinstance(puppet.save(1), Durable)
    assert puppet.close()


def test_an_agent_that_never_starts_is_an_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.handover.spawn._BOOT", "raise SystemExit('no')")
    puppet = Puppet(run_dir)
    with pytest.raises(AgentError, match="ended at once"):
        puppet.start()


def test_an_adopted_agent_that_dies_is_replaced_at_the_start(run_dir: Path) -> None:
    agent = make_orphan(run_dir, linger=30)
    found = find_orphan(here(run_dir), 0)
    assert found is not None
    channel, offer, fds = found
    assert len(offer.snapshots) == len(fds) == 1 and offer.agent == agent
    puppet = Puppet(run_dir)
    puppet.client.adopt(channel, offer, fds)
    os.kill(agent, signal.SIGKILL)
    puppet.start(parent=1, step=1)
    assert puppet.client.pid != agent
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close()
    assert puppet.steps() == [2, 1]


def test_a_stopped_orphan_does_not_hold_up_a_successor(run_dir: Path) -> None:
    agent = make_orphan(run_dir, linger=30)
    where = here(run_dir)
    os.kill(agent, signal.SIGSTOP)
    wait_for(lambda: ") T " in Path(f"/proc/{agent}/stat").read_text(), "stopped")
    started = time.monotonic()
    assert find_orphan(where, 0) is None
    assert time.monotonic() - started < 30  # an agent that is merely slow is given 60 s
    os.kill(agent, signal.SIGCONT)
    found = find_orphan(where, 0)  # the control: going again, it answers
    assert found is not None
    puppet = Puppet(run_dir)
    puppet.client.adopt(*found)
    puppet.start(parent=1, step=1)
    assert puppet.client.pid == agent
    assert puppet.close()


def test_an_agent_whose_trainer_lives_is_not_handed_over(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    assert isinstance(puppet.save(1), Durable)
    assert find_orphan(here(run_dir), 0) is None
    assert "still uses this run" in caplog.text
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close()


def test_a_peer_that_answers_and_leaves_at_once_is_heard() -> None:
    """As an agent that refuses a successor: its answer must not be taken for a broken connection."""
    ours, theirs = socket.socketpair()
    peer = Channel(theirs)

    class Sending:
        """Our socket, whose peer answers and leaves before the call that sent the question returns."""

        def sendmsg(self, *arguments: Any) -> int:
            sent = ours.sendmsg(*arguments)
            assert peer.receive() is not None
            peer.send(NoOffer("closing"))
            peer.close()
            return sent

        def __getattr__(self, name: str) -> Any:
            return getattr(ours, name)

    channel = Channel(cast(socket.socket, Sending()))
    channel.send(Adopt(PROTOCOL, 1))
    received = channel.receive()
    assert received is not None and received[0] == NoOffer("closing")
    channel.close()


def test_an_offer_in_the_making_holds_nothing_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To hash a large snapshot takes long. Meanwhile the agent answers others, and does not leave."""
    made, may_go_on = threading.Event(), threading.Event()

    def slow(newest: object) -> tuple[Offer, list[int]]:
        made.set()
        assert may_go_on.wait(30)
        return Offer(os.getpid()), []

    monkeypatch.setattr(offer, "make_offer", slow)
    ours, theirs = socket.socketpair()
    agent = process.Agent(Channel(theirs))
    agent.linger_seconds = 60.0
    first, second = socket.socketpair(), socket.socketpair()
    agent._leave_at = 0.0  # long ago
    for pair in (first, second):
        client = Channel(pair[0])
        client.send(Adopt(PROTOCOL, os.getpid()))
        agent._answer(Channel(pair[1]))
        assert made.wait(30)
    refused = Channel(second[0]).receive()
    assert refused is not None and isinstance(refused[0], NoOffer)
    assert not agent._is_over()
    may_go_on.set()
    wait_for(lambda: not agent._calls.empty(), "the offer is made")
    agent._on_wake()
    answer = Channel(first[0]).receive()
    assert answer is not None and isinstance(answer[0], Offer)
    assert agent.trainer.pid == os.getpid()
    for sock in (ours, theirs, *first, *second):
        sock.close()
