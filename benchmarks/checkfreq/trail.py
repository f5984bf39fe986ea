"""What a run left in `events.jsonl`: checkpoints with their trigger and commit, waits, decisions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.events.journal import read_events


@dataclass
class Saved:
    """One committed checkpoint. `waited`: what the training thread waited for it, by stepwell's own account."""

    step: int
    strategy: str
    nbytes: int
    waited: float
    copied: float
    committed: float
    """Time of day."""


class Trail:
    """The events of a run, as far as it has come."""

    def __init__(self, run: Path) -> None:
        self.events: list[dict[str, Any]] = list(read_events(run / "events.jsonl"))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def saved(self) -> list[Saved]:
        """Committed checkpoints, in the order of their steps."""
        commits = {event["step"]: event["time"] for event in self.of("commit")}
        stalls: dict[int, float] = {}
        for event in self.of("stall"):
            stalls[event["step"]] = stalls.get(event["step"], 0.0) + event["seconds"]
        found = {}
        for event in self.of("snapshot"):
            step = event["step"]
            if step in commits:
                waited = max(event["stall_seconds"], stalls.get(step, 0.0))
                copied = event["copy_seconds"]
                found[step] = Saved(step, event["strategy"], event["nbytes"], waited, copied, commits[step])
        return [found[step] for step in sorted(found)]

    def decisions(self) -> list[dict[str, Any]]:
        return self.of("decision")


def count_commits(run: Path) -> int:
    """How many checkpoints exist by now. Cheap enough to ask while training."""
    try:
        return (run / "events.jsonl").read_bytes().count(b'"kind": "commit"')
    except OSError:
        return 0
