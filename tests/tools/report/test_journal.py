"""What a person sees of events: each thing once, though the file has all of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stepwell.events import journal, run_events
from stepwell.events.chain_events import ChainEnded
from stepwell.events.journal import EventLog, read_events


def test_the_same_again_is_for_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    log = EventLog(tmp_path / "events.jsonl", who="trainer")
    reasons = ["no memory yet", "no memory yet", "no memory yet", "all slots are busy", "no memory yet"]
    for step, reason in enumerate(reasons):
        log.emit(run_events.SnapshotSkipped(step=step, reason=reason))
    log.close()
    assert [record.message for record in caplog.records] == [
        "Skipped the save at step 0: no memory yet",
        "Skipped the save at step 3: all slots are busy",
        "Skipped the save at step 4: no memory yet",
    ]
    assert [event["step"] for event in read_events(log.path)] == [0, 1, 2, 3, 4]


def test_after_a_while_it_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_AGAIN_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="stepwell")
    log = EventLog(tmp_path / "events.jsonl", who="trainer")
    for step in range(2):
        log.emit(run_events.SnapshotSkipped(step=step, reason="all slots are busy"))
    log.close()
    assert len(caplog.records) == 2


def test_another_choice_for_the_same_reason_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    log = EventLog(tmp_path / "events.jsonl", who="trainer")
    for step, strategy in enumerate(("device", "overlap", "overlap")):
        log.emit(run_events.Strategy(step=step, strategy=strategy, reason="waits less at the gate"))
    log.close()
    assert ["device" in record.message for record in caplog.records] == [True, False]


def test_warnings_are_always_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "events.jsonl", who="trainer")
    for step in range(2):
        log.emit(ChainEnded(base=f"step-{step}", reason="no space left on device"))
    log.close()
    assert len(caplog.records) == 2
