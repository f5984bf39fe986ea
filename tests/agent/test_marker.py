"""The mark that lets the shared place know how far the nodes are, beside `tests/levels/test_forgotten.py`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stepwell.agent.target import marker
from stepwell.errors import FencedError
from stepwell.events.journal import EventLog
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


def test_who_is_fenced_has_nothing_left_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its agent waits for that at the end."""
    asked = threading.Event()

    def fence(*_: Any) -> None:
        asked.set()
        raise FencedError("lineage 2 continues this run", lineage=1, newest=2)

    monkeypatch.setattr(marker, "check_fence", fence)
    of_run = marker.Marker(RunPaths(tmp_path), "run", "cache", EventLog(tmp_path / "events.jsonl", who="agent"))
    of_run.note(CheckpointId(1, 0, 1))
    assert not of_run.is_idle
    of_run.start()
    assert asked.wait(10)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "stepwell-mark"] or [None]
    if thread is not None:
        thread.join(10)
    assert of_run.is_idle
    of_run.note(CheckpointId(2, 0, 1))
    assert of_run.is_idle


def test_what_a_killed_agent_left_is_gone_after_the_next_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary file of `nodes.json`, and nothing else that lies beside it."""
    monkeypatch.setattr(marker, "check_fence", lambda *_: None)
    (tmp_path / "nodes.json.4230942968.20409.tmp").write_bytes(b"{")
    (tmp_path / "notes.tmp").write_bytes(b"of the user")
    of_run = marker.Marker(RunPaths(tmp_path), "run", "cache", EventLog(tmp_path / "events.jsonl", who="agent"))
    of_run.note(CheckpointId(1, 0, 1))
    of_run.start()
    until = time.monotonic() + 10
    while not of_run.is_idle and time.monotonic() < until:
        time.sleep(0.01)
    of_run.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl") == ["nodes.json", "notes.tmp"]
