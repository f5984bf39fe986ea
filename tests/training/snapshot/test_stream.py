"""What the agent says while a save is streamed."""

from __future__ import annotations

import pytest

from stepwell.handover.message import Heard
from stepwell.handover.protocol import BaseWanted, ChainOver, ChunkDone, DeltaAppended, Durable, Flushed, Lost, Replaced
from stepwell.training.snapshot.streamed import StreamAnswers


def test_words_about_something_else_do_not_end_a_save() -> None:
    """A flush that is over, a chain that wants a base or has one more record, and saves before this one."""
    answers = StreamAnswers()
    for message in (Flushed(1), BaseWanted("it is long"), DeltaAppended(1), ChainOver("step-1")):
        answers.put(message)
    answers.put(Durable(6, 1, "step-1", 0.1))
    answers.put(ChunkDone(7))
    assert answers.wait(7) == ChunkDone(7)


@pytest.mark.parametrize("message", [Replaced(1), Lost()])
def test_an_agent_that_is_gone_ends_it(message: Heard) -> None:
    answers = StreamAnswers()
    answers.put(message)
    assert answers.wait(7) == message
