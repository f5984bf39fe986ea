"""What an agent decides at the very end of a run is told to its trainer before it says goodbye."""

from __future__ import annotations

import socket

import pytest

from stepwell.agent.process import Agent
from stepwell.handover.channel import Channel
from stepwell.handover.protocol import Bye, Durable


def test_what_became_durable_after_the_last_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    agent, trainer = Agent(Channel(theirs)), Channel(ours)
    word = Durable(7, 3, "step-000000000003.l0001", 0.1)

    def is_over() -> bool:
        """The worker ends its last snapshot right before this look, and has nothing to do any more."""
        agent.worker.outbox.append(word)
        return True

    monkeypatch.setattr(agent, "_is_over", is_over)
    monkeypatch.setattr(agent.worker, "start", lambda: None)
    agent.run()
    theirs.close()
    heard = [received[0] for received in iter(trainer.receive, None)]
    ours.close()
    assert heard == [word, Bye()]
