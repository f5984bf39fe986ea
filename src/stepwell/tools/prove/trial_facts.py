"""What a run's event file says, as the few facts a trial needs.

Owns:    following `events.jsonl` while it grows, and reading starts, restores, snapshots, commits and logged values.
Not:     judging any of it (proof), comparing two runs (logs).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.events.event_file import opened

EventLine = dict[str, Any]


class EventTail:
    """Follows an event file. `lines` holds everything read so far, in file order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[tuple[int, bytes], int] = {}
        """Of the files that were read: a full one gets another name."""
        self.lines: list[EventLine] = []

    def read(self) -> list[EventLine]:
        """Lines that were added since the last call. A line that is still being written waits for the next one."""
        new: list[EventLine] = []
        with opened(self._path) as parts:
            for part in parts:
                if part.is_kept and self._offsets:
                    continue  # what it holds was read where it came from
                part.file.seek(self._offsets.get(part.identity, 0))
                data = part.file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[part.identity] = part.file.tell() - len(data) + len(whole)
                new += _parse(whole.split(b"\n"))
            there = {part.identity for part in parts if not part.is_kept}
        self._offsets = {part: offset for part, offset in self._offsets.items() if part in there}
        self.lines += new
        return new


def _parse(lines: Iterable[bytes]) -> Iterator[EventLine]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if isinstance(event, dict) and "kind" in event:
            yield event


@dataclass(frozen=True)
class Resume:
    """How a restarted trainer began: at `step` from `source` ("memory", "disk"), or fresh (`source` None)."""

    lineage: int
    step: int
    source: str | None
    directory: str | None


def find_resume(lines: Iterable[EventLine], *, after: int = 0) -> Resume | None:
    """The first start of a lineage beyond `after`, with the restore that led to it. None: it never got so far."""
    restored: EventLine | None = None
    for event in lines:
        if event["kind"] == "restore":
            restored = event
        elif event["kind"] == "fresh" or (event["kind"] == "start" and event["lineage"] <= after):
            restored = None
        elif event["kind"] == "start":
            if restored is None:
                return Resume(event["lineage"], event["step"], None, None)
            return Resume(event["lineage"], event["step"], restored["source"], restored["directory"])
    return None


def starts(lines: Iterable[EventLine]) -> dict[int, int]:
    """Lineage -> step at which it began."""
    return {event["lineage"]: event["step"] for event in lines if event["kind"] == "start"}


def committed(lines: Iterable[EventLine]) -> dict[str, int]:
    """Directory -> step of every checkpoint that was committed past step 0, pruned ones too, in order."""
    return {event["directory"]: event["step"] for event in lines if event["kind"] == "commit" and event["step"] > 0}


def redirected(lines: Iterable[EventLine]) -> str | None:
    """The bucket that the script names, if it does."""
    return next((event["asked"] for event in lines if event["kind"] == "redirected"), None)


def largest_interval(lines: Iterable[EventLine]) -> int:
    """The most steps that lay between two consecutive checkpoints, or between a start and the first one after it.

    A snapshot that only stays in memory is no end of an interval: it may be lost with an agent.
    """
    last: dict[int, int] = {}
    largest = 0
    for event in lines:
        lineage = event["lineage"]
        if event["kind"] == "start":
            last[lineage] = event["step"]
        elif event["kind"] == "snapshot" and event.get("durable", True) and lineage in last:
            largest = max(largest, event["step"] - last[lineage])
            last[lineage] = event["step"]
    return largest


def seconds_per_step(lines: Iterable[EventLine]) -> float:
    """How long one iteration took on average, from the first start to the last snapshot; 0 if there was none."""
    start: EventLine | None = None
    seconds = 0.0
    for event in lines:
        if event["kind"] == "start" and start is None:
            start = event
        elif event["kind"] == "snapshot" and start is not None and event["step"] > start["step"]:
            seconds = (event["time"] - start["time"]) / (event["step"] - start["step"])
    return max(0.0, seconds)


def voided(lines: Iterable[EventLine]) -> list[EventLine]:
    """Snapshots that were thrown away because a leaf changed while it was copied."""
    return [event for event in lines if event["kind"] == "snapshot-void"]
