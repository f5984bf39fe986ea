"""What the agent says while a save is streamed."""

from __future__ import annotations

import pytest

from stepwell.training.snapshot.streamed import StreamAnswers


def test_words_about_something_else_do_not_end_a_save() -> None:
    """A flush that is over, a chain that wants a base or has one more record, and saves before this one."""
    answers = StreamAnswers()
    for kind in ("flushed", "base_due", "delta", "chain_over"):
        answers.put({"type": kind, "step": 1})
    answers.put({"type": "durable", "sequence": 6})
    answers.put({"type": "chunk_done", "sequence": 7})
    assert answers.wait(7) == "chunk_done"


@pytest.mark.parametrize("kind", ["replaced", "lost"])
def test_an_agent_that_is_gone_ends_it(kind: str) -> None:
    answers = StreamAnswers()
    answers.put({"type": kind, "pid": 1})
    assert answers.wait(7) == kind
