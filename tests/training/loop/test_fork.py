"""A forked child has a copy of the training process, but not its copier, its agent or its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from tests.crash.harness import Server, start_script


def fork(server: Server, run_dir: Path, how: str) -> str:
    """What parent and child printed, where the parent ended well."""
    log = run_dir.with_suffix(".log")
    status = start_script(server, Path(__file__).with_name("forker.py"), run_dir, how, log=log).wait()
    assert status == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "error", "multiprocessing", "refused"])
def test_a_child_that_steps_during_a_snapshot_leaves_the_run_alone(how: str, server: Server, run_dir: Path) -> None:
    printed = fork(server, run_dir, how)
    assert "child has stepped" in printed
    assert f"child ended with {int(how == 'error')}" in printed
    assert "committed 8" in printed
    assert printed.count("was forked from process") == 1, printed
    events = list(read_events(run_dir / "events.jsonl"))
    assert len({event["process"] for event in events if event["who"] == "trainer"}) == 1
    assert not [event for event in events if event["kind"] in ("ended", "snapshot-void", "told", "left")]


def test_a_child_may_have_a_run_of_its_own(server: Server, run_dir: Path) -> None:
    """The hooks of its own Checkpointer count, and those of the parent's do nothing."""
    printed = fork(server, run_dir, "own")
    assert "own run committed 4" in printed
    assert "committed 8" in printed


def test_loader_workers_may_be_forked_during_a_snapshot(server: Server, run_dir: Path) -> None:
    printed = fork(server, run_dir, "workers")
    assert "committed 8" in printed
    assert "was forked" not in printed
