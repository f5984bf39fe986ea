"""A record that is too large by a few bytes only the agent sees: it gives up at once, and goes on with the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepwell.handover.protocol import Durable, WriteFailed
from stepwell.storage.format.document import MAX_DOCUMENT_BYTES
from tests.agent.puppet import Puppet


def test_it_is_given_up_and_not_written_again_and_again(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path / "run")
    puppet.start()
    usual = puppet.request
    huge = {"x": "y" * MAX_DOCUMENT_BYTES}
    puppet.request = lambda step, **about: replace(usual(step, **about), tree=huge)  # type: ignore[method-assign]
    found = puppet.save(1)
    assert isinstance(found, WriteFailed) and found.final and "stepwell.record/1 of 671" in found.error
    puppet.request = usual  # type: ignore[method-assign]
    assert isinstance(puppet.save(2), Durable)
    assert len(puppet.events("persist-failed")) == 1 and puppet.steps() == [2]
    assert puppet.close()
