"""What a trial reads off an event file, while it grows and when it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.tools.prove.trial_facts import (
    EventTail,
    Resume,
    committed,
    find_resume,
    largest_interval,
    seconds_per_step,
    starts,
    voided,
)


def line(kind: str, *, time: float = 0.0, lineage: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "lineage": lineage, **fields}


def test_a_tail_gives_each_line_once_and_waits_for_the_rest_of_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    text = json.dumps(line("log", step=1)).encode()
    with path.open("ab", buffering=0) as file:
        file.write(text + b"\n" + text[:10])
        assert [event["step"] for event in tail.read()] == [1]
        assert tail.read() == []
        file.write(text[10:] + b"\n")
        assert len(tail.read()) == 1
        file.write(b'{"kind": "lo\n[1]\n' + text + b"\n")  # torn by a kill; not an event
        assert len(tail.read()) == 1
    assert len(tail.lines) == 3


def test_a_resume_is_the_first_start_and_the_restore_before_it() -> None:
    restore = line("restore", lineage=0, step=20, source="memory", directory="step-000000000020.l0001")
    start = line("start", lineage=2, step=20)
    assert find_resume([restore, start, line("start", lineage=3, step=0)]) == Resume(
        2, 20, "memory", "step-000000000020.l0001"
    )
    assert find_resume([line("fresh"), line("start", lineage=2, step=0)]) == Resume(2, 0, None, None)
    assert find_resume([restore]) is None
    again = [restore, start, line("fresh"), line("start", lineage=3, step=0)]
    assert find_resume(again, after=2) == Resume(3, 0, None, None)
    assert find_resume(again, after=3) is None
    assert starts(again) == {2: 20, 3: 0}


def test_only_commits_past_step_0_count() -> None:
    lines = [line("commit", step=0, directory="a"), line("commit", step=5, directory="b"), line("prune", directory="b")]
    assert committed(lines) == {"b": 5}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], 0),
        ([("start", 1, 0), ("snapshot", 1, 10), ("snapshot", 1, 25), ("snapshot", 1, 30)], 15),
        # A restart is no gap, the way from it to the next snapshot is one.
        ([("start", 1, 0), ("snapshot", 1, 10), ("start", 2, 10), ("snapshot", 2, 22)], 12),
        # What stays in memory is lost with an agent: it is no end of an interval.
        ([("start", 1, 0), ("snapshot in memory", 1, 9), ("snapshot", 1, 10)], 10),
        # A late line of the old lineage does not mix with the new one.
        ([("start", 1, 0), ("snapshot", 1, 10), ("start", 2, 10), ("snapshot", 1, 12), ("snapshot", 2, 20)], 10),
    ],
)
def test_the_largest_interval(lines: list[tuple[str, int, int]], expected: int) -> None:
    events = [
        line(kind.split()[0], lineage=lineage, step=step, durable=kind == "snapshot") for kind, lineage, step in lines
    ]
    assert largest_interval(events) == expected


def test_seconds_per_step() -> None:
    assert seconds_per_step([]) == 0.0
    lines = [line("start", time=100.0, step=0), line("snapshot", time=102.0, step=10), line("log", time=200.0, step=11)]
    assert seconds_per_step(lines) == pytest.approx(0.2)


def test_voided_snapshots() -> None:
    void = line("snapshot-void", step=8, leaf="a", seen_by="version guard")
    assert voided([line("snapshot", step=4), void]) == [void]
