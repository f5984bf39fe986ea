"""A record that is too large by a few bytes only the agent sees: it gives up at once, and goes on with the next one."""

from __future__ import annotations

from pathlib import Path

from stepwell.storage.format.document import MAX_DOCUMENT_BYTES
from tests.agent.puppet import Puppet


def test_it_is_given_up_and_not_written_again_and_again(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path / "run")
    puppet.start()
    usual = puppet.meta
    puppet.meta = lambda step: {**usual(step), "tree": {"x": "y" * MAX_DOCUMENT_BYTES}}  # type: ignore[method-assign]
    found = puppet.save(1)
    assert found["type"] == "failed" and found["final"] and "stepwell.record/1 of 671" in found["error"]
    puppet.meta = usual  # type: ignore[method-assign]
    assert puppet.save(2)["type"] == "durable"
    assert len(puppet.events("persist-failed")) == 1 and puppet.steps() == [2]
    assert puppet.close()
