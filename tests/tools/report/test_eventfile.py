"""The event file stays bounded, whoever writes it, and nothing that matters is dropped without a count."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

import pytest

import stepwell
from stepwell.errors import ConfigError
from stepwell.events import run_events
from stepwell.events.event_file import ROUTINE, VARIABLE, EventFile, parts_of, rotate
from stepwell.events.journal import EventLog, read_events
from stepwell.tools.prove.trial_facts import EventTail

MOST = 16 << 10
IN_ROUND = 25
BOUND = 2 * MOST + MOST // 4 + 4096
"""Two parts and the kept one; each line may go a little beyond, and one counts what was dropped."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventLog:
    monkeypatch.setenv(VARIABLE, str(MOST))
    return EventLog(tmp_path / "events.jsonl", who="trainer")


def nbytes(path: Path) -> int:
    return sum(part.stat().st_size for part in parts_of(path) if part.exists())


def line(kind: str, number: int, **more: object) -> bytes:
    head = {"time": float(number), "who": "x", "process": 1, "lineage": 1, "kind": kind, "step": number}
    return json.dumps({**head, **more}).encode() + b"\n"


def test_it_is_bounded_and_what_matters_stays(log: EventLog) -> None:
    for step in range(3_000):
        log.emit(run_events.Stall(step=step, seconds=0.0))
        if step % 300 == 0:
            log.emit(run_events.AgentDeath(pid=step, status="killed", resent=0))
        assert nbytes(log.path) <= BOUND
    log.close()
    found = list(read_events(log.path))
    assert [event["pid"] for event in found if event["kind"] == "agent-death"] == list(range(0, 3_000, 300))
    steps = [event["step"] for event in found if event["kind"] == "stall"]
    assert steps == list(range(steps[0], 3_000)), "of the routine the newest are there, in order"
    assert found[0]["kind"] == "thinned" and found[0]["dropped"] == {"stall": steps[0]}, "and the others are counted"


def test_what_matters_is_bounded_too_and_counted(log: EventLog) -> None:
    for step in range(2_000):
        log.emit(run_events.AgentDeath(pid=step, status="killed", resent=0))
        assert nbytes(log.path) <= BOUND
    log.close()
    summary, *found = list(read_events(log.path))
    assert found[0]["pid"] == summary["dropped"]["agent-death"] and found[-1]["pid"] == 1_999
    assert summary["until"] < found[0]["time"]


def test_each_line_of_a_follower_comes_once(log: EventLog) -> None:
    tail, rare = EventTail(log.path), EventTail(log.path)
    for step in range(1_000):
        log.emit(run_events.Stall(step=step, seconds=0.0))
        if step % 50 == 0:
            tail.read()
    tail.read()
    assert [event["step"] for event in tail.lines] == list(range(1_000))
    late = [event["step"] for event in rare.read() if event["kind"] == "stall"]
    assert late == list(range(late[0], 1_000)) and not rare.read()


def _write(path: Path, who: int, rounds: int, barrier: Barrier) -> None:
    """In rounds, all of which fit into one file: nobody is held up within a write while two of them fill up."""
    file = EventFile(path, MOST)
    for number in range(rounds * IN_ROUND):
        if number % IN_ROUND == 0:
            barrier.wait(60.0)
        file.append(line("start", number, by=who))
    file.close()


def test_many_processes_write_and_rotate_at_once(tmp_path: Path) -> None:
    """Each line is there once, or is counted."""
    path, writers, rounds = tmp_path / "events.jsonl", 4, 30
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(writers)
    processes = [context.Process(target=_write, args=(path, who, rounds, barrier)) for who in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    summary, *found = list(read_events(path))
    lines = Counter((event["by"], event["step"]) for event in found)
    assert set(lines.values()) == {1}
    assert len(lines) + summary["dropped"]["start"] == writers * rounds * IN_ROUND
    assert nbytes(path) <= BOUND + writers * 200


def test_a_writer_that_was_away_goes_on_in_the_present_part(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    away, busy = EventFile(path, MOST), EventFile(path, MOST)
    away.append(line("start", 0))
    for number in range(1_000):
        busy.append(line("log", number))
    away.append(line("finished", 1_000))
    assert [event["kind"] for event in read_events(path) if event["kind"] != "log"] == ["thinned", "start", "finished"]
    away.close()
    busy.close()


def test_a_rotation_that_was_cut_off_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    parts_of(path)[1].write_bytes(line("start", 1) + line("log", 1))
    path.write_bytes(line("finished", 2))
    with mock.patch.object(os, "rename", _only_once()), pytest.raises(OSError, match="killed here"):
        rotate(path, 4096)
    rotate(path, 4096)
    assert [event["kind"] for event in read_events(path)] == ["thinned", "start", "finished"]


def _only_once() -> Callable[[Path, Path], None]:
    left = [os.replace]

    def rename(source: Path, target: Path) -> None:
        if not left:
            raise OSError("killed here")
        left.pop()(source, target)

    return rename


def test_where_nothing_can_be_renamed_events_are_written_on(log: EventLog) -> None:
    with mock.patch.object(os, "rename", side_effect=PermissionError):
        for step in range(500):
            log.emit(run_events.Stall(step=step, seconds=0.0))
    assert [event["step"] for event in read_events(log.path)] == list(range(500))
    log.close()


def test_a_file_system_that_hangs_holds_only_the_writing_thread(tmp_path: Path) -> None:
    log, hangs, goes_on = EventLog(tmp_path / "events.jsonl", who="trainer", background=True), *_two_events()
    with mock.patch.object(EventFile, "append", lambda *_: (hangs.set(), goes_on.wait(30.0))):
        log.emit(run_events.Stall(step=1, seconds=0.0))
        assert hangs.wait(30.0)
        log.emit(run_events.Stall(step=2, seconds=0.0))  # returns
        goes_on.set()
        log.close()


def _two_events() -> tuple[threading.Event, threading.Event]:
    return threading.Event(), threading.Event()


@pytest.mark.parametrize("value", ["", "much", "-1", "100"])
def test_a_bound_that_means_nothing_is_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=VARIABLE):
        EventLog(tmp_path / "events.jsonl", who="trainer")


def test_only_kinds_that_exist_and_warn_of_nothing_are_dropped() -> None:
    for module in pkgutil.walk_packages(stepwell.__path__, "stepwell."):
        if module.name.endswith("events") or module.name == "stepwell.training.loop.overdue":
            importlib.import_module(module.name)

    def all_of(kind: type[run_events.Event]) -> list[type[run_events.Event]]:
        return [kind, *(below for each in kind.__subclasses__() for below in all_of(each))]

    levels = {kind.kind.fget(object.__new__(kind)): kind.level for kind in all_of(run_events.Event)}  # type: ignore[attr-defined]
    assert levels.keys() >= ROUTINE
    assert not [kind for kind in ROUTINE if levels[kind] > 20]


def test_a_rotation_that_fails_is_not_tried_with_each_line(tmp_path: Path) -> None:
    """It reads the whole old part: a full disk would cost a writer that for each line."""
    file = EventFile(tmp_path / "events.jsonl", MOST)
    with mock.patch("stepwell.events.event_file.rotate", side_effect=OSError(28, "No space left on device")) as tried:
        for _ in range(400):
            file.append(b"x" * 99 + b"\n")
    assert tried.call_count == 1 and nbytes(tmp_path / "events.jsonl") == 40_000
    file.close()
