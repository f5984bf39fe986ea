"""What happened in a run and when, from its event file; times in seconds since the first start.

Owns:    taking the lines apart by lineage. Nothing here knows how it will be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stepwell.events.event_file import THINNED


@dataclass(frozen=True)
class Point:
    """Something at a time and a step. `value` is a length in seconds where there is one."""

    time: float
    step: int
    value: float = 0.0


@dataclass
class LineageLife:
    """One life of the trainer: where it began (`source` None: fresh), how it went on."""

    number: int
    start: Point
    source: str | None
    restore_seconds: float
    path: list[Point] = field(default_factory=list)

    @property
    def end(self) -> Point:
        """The last thing known of it."""
        return self.path[-1]

    @property
    def iterations(self) -> list[Point]:
        """Steps whose length is known: the one before was seen too. The first one after a start is loading as well."""
        pairs = zip(self.path[1:], self.path[2:], strict=False)
        return [Point(b.time, b.step, b.time - a.time) for a, b in pairs if b.step == a.step + 1]


@dataclass
class Story:
    """A run as it went."""

    began: float
    lineages: list[LineageLife] = field(default_factory=list)
    dropped: int = 0
    """Events of a long run that its file does not hold any more."""
    stalls: list[Point] = field(default_factory=list)
    snapshots: list[Point] = field(default_factory=list)
    commits: list[Point] = field(default_factory=list)
    voids: list[Point] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How far the run got."""
        return max((life.end.step for life in self.lineages), default=0)

    @property
    def seconds(self) -> float:
        """From the first start to the last event."""
        ends = [lineage.end.time for lineage in self.lineages] + [point.time for point in self.commits]
        return max(ends, default=0.0)


def tell(lines: Iterable[dict[str, Any]]) -> Story:
    """Read a story off the event lines. Without any start it is empty."""
    story: Story | None = None
    restored: dict[str, Any] | None = None
    lives: dict[int, LineageLife] = {}
    dropped = 0
    for event in lines:
        kind = event["kind"]
        if kind == THINNED:
            dropped = sum(event["dropped"].values())
        elif kind == "restore":
            restored = event
        elif kind == "start":
            story = story or Story(began=event["time"])
            lives[event["lineage"]] = life = _begin(event, restored, story.began)
            story.lineages.append(life)
            restored = None
        elif story is not None and "step" in event:
            point = Point(event["time"] - story.began, event["step"])
            if kind == "commit":
                story.commits.append(point)
            elif kind == "snapshot":
                story.snapshots.append(point)
                # What the loop waited at the trigger and at the gate: the whole visible cost of this snapshot.
                story.stalls.append(Point(point.time, point.step, event["stall_seconds"]))
            elif kind == "snapshot-void":
                story.voids.append(point)
            elif kind == "finished":
                _finish(lives.get(event["lineage"]), point)
            if kind in ("log", "snapshot") and event["lineage"] in lives:
                _advance(lives[event["lineage"]], point)
    story = story or Story(began=0.0)
    story.dropped = dropped
    return story


def _begin(event: dict[str, Any], restored: dict[str, Any] | None, began: float) -> LineageLife:
    start = Point(event["time"] - began, event["step"])
    source = None if restored is None else restored["source"]
    seconds = 0.0 if restored is None else restored["seconds"]
    return LineageLife(event["lineage"], start, source, seconds, path=[start])


def _advance(life: LineageLife, point: Point) -> None:
    """The last sign of a step counts: what an epoch's end logs belongs to the next step and comes long before it."""
    if point.step == life.end.step and len(life.path) > 1:
        life.path[-1] = point
    elif point.step > life.end.step:
        life.path.append(point)


def _finish(life: LineageLife | None, point: Point) -> None:
    """What was logged after the last step belongs to a step that never came."""
    while life is not None and len(life.path) > 1 and life.end.step > point.step:
        life.path.pop()
