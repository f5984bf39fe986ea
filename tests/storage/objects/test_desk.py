"""Events of a run in a bucket: all parts of the file are copied there, and come back on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.events import run_events
from stepwell.events.event_file import VARIABLE, parts_of
from stepwell.events.journal import EventLog, read_events
from stepwell.storage.store import mirror
from stepwell.storage.store.objects import ObjectFacts, ObjectPath
from stepwell.storage.store.paths import RunPaths


def test_a_rotated_event_file_is_copied_with_its_older_parts(
    address: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "16384")
    paths, seen = RunPaths(address), dict[str, ObjectFacts]()
    paths.desk.mkdir(parents=True)
    log = EventLog(paths.events, who="trainer")
    for step in range(1_000):
        log.emit(run_events.Stall(step=step, seconds=0.0))
        if step % 100 == 0:
            log.emit(run_events.AgentDeath(pid=step, status="killed", resent=0))
            mirror.publish(paths, seen)
    log.close()
    assert all(part.exists() for part in parts_of(paths.events)), "it was rotated more than once"
    present = paths.events.stat().st_size
    mirror.publish(paths, seen, is_last=True)
    here = list(read_events(paths.events))
    monkeypatch.setenv("STEPWELL_DESK", str(tmp_path / "elsewhere"))
    mirror.fetch(paths, is_reader=True)
    assert paths.events.stat().st_size == present
    assert list(read_events(paths.events)) == here
    assert [event["pid"] for event in here if event["kind"] == "agent-death"] == list(range(0, 1_000, 100))


def test_a_file_that_became_smaller_is_sent(
    address: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another file: without its identity it would wait until it is as large as the one before."""
    monkeypatch.setenv(VARIABLE, "16384")
    paths, seen = RunPaths(address), dict[str, ObjectFacts]()
    paths.desk.mkdir(parents=True)
    log = EventLog(paths.events, who="trainer")
    while not parts_of(paths.events)[1].exists():
        mirror.publish(paths, seen)
        log.emit(run_events.Stall(step=1, seconds=0.0))
    mirror.publish(paths, seen)
    log.close()
    monkeypatch.setenv("STEPWELL_DESK", str(tmp_path / "elsewhere"))
    mirror.fetch(paths, is_reader=True)
    assert paths.events.stat().st_size < 16384 // 4
