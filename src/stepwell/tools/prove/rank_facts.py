"""The ranks of a run, as they tell of themselves: progress and events of each.

Owns:    which processes a run has now, and what all of its ranks wrote down.
Not:     killing them (command).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import Progress, read_progress
from stepwell.tools.prove.trial_facts import EventLine, EventTail

_PROGRESS: Final = re.compile(r"progress\.rank-\d{5}")


@dataclass(frozen=True)
class Processes:
    """All ranks of one lineage, in their order."""

    ranks: list[Progress]

    @property
    def lineage(self) -> int:
        return self.ranks[0].lineage

    @property
    def step(self) -> int:
        """How far the first of them got."""
        return max(rank.step for rank in self.ranks)

    @property
    def trainers(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    @property
    def agents(self) -> list[int]:
        return [rank.agent_pid for rank in self.ranks]


def count_ranks(root: Path) -> int:
    """How many ranks a run had, by the files they left."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return 1 + sum(_PROGRESS.fullmatch(name) is not None for name in names)


def find_processes(root: Path, world_size: int, *, after: int = 0) -> Processes | None:
    """The processes of a lineage beyond `after`. None while not all of its ranks are there."""
    found = [read_progress(RunPaths(root, rank).progress) for rank in range(world_size)]
    ranks = [progress for progress in found if progress is not None]
    if len(ranks) < world_size or len({rank.lineage for rank in ranks}) > 1 or ranks[0].lineage <= after:
        return None
    return Processes(ranks)


def find_agents(root: Path, world_size: int) -> set[int]:
    """The agents that the ranks told of last, whatever became of the ranks."""
    found = [read_progress(RunPaths(root, rank).progress) for rank in range(world_size)]
    return {progress.agent_pid for progress in found if progress is not None}


def read_all(root: Path, world_size: int) -> list[list[EventLine]]:
    """The events of each rank."""
    return [EventTail(RunPaths(root, rank).events).read() for rank in range(world_size)]
