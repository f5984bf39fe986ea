"""The small frozen types that all stages share.

Owns:    identities (which checkpoint, which rank) and the retention options.
Not:     bytes (format), files (store), tensors (state).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from stepwell.errors import ConfigError

_NAME = re.compile(r"^step-(\d{12})\.l(\d{4,8})(?:\.r(\d{1,6}))?$")


@functools.total_ordering
@dataclass(frozen=True)
class CheckpointId:
    """The id of a checkpoint: ordered by step, then lineage, then how often that lineage saved the step again."""

    step: int
    repeat: int
    lineage: int

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory in the run."""
        again = f".r{self.repeat}" if self.repeat else ""
        return f"step-{self.step:012d}.l{self.lineage:04d}{again}"

    @classmethod
    def parse(cls, directory: str) -> CheckpointId | None:
        """The id behind a directory name, or None for a stray name."""
        match = _NAME.match(directory)
        if match is None:
            return None
        found = cls(step=int(match[1]), lineage=int(match[2]), repeat=int(match[3] or 0))
        return found if found.directory == directory else None

    def __lt__(self, other: CheckpointId) -> bool:
        return (self.step, self.lineage, self.repeat) < (other.step, other.lineage, other.repeat)

    def __str__(self) -> str:
        return self.directory


@dataclass(frozen=True)
class Owner:
    """The process of the run that a shard belongs to."""

    rank: int = 0
    world_size: int = 1

    @property
    def stem(self) -> str:
        """Prefix of every file name that this rank writes."""
        return f"rank-{self.rank:05d}"

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits for all ranks and removes old checkpoints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1


@dataclass(frozen=True)
class Status:
    """The current state of a run.

    memory_step:      the newest step that is complete in memory, where it survives this process
    committed_step:   the newest durable step; with levels, on the nodes
    shared_step:      with levels, the newest step in the shared place
    delta_step:       with `deltas=`, the last step in the chain of lossy records
    degraded:         why `committed_step` is not protected; None if it is
    policy:           a sentence that gives the interval and its reason
    overdue_since:    since when (as `time.time()`) a checkpoint is several intervals late; `overdue_because` tells why
    """

    step: int
    epoch: int
    committed_step: int | None
    memory_step: int | None
    pending: int
    agent_pid: int
    lineage: int
    is_fenced: bool
    policy: str
    degraded: str | None = None
    shared_step: int | None = None
    delta_step: int | None = None
    is_finished: bool = False
    overdue_since: float | None = None
    overdue_because: str | None = None


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints retention keeps. It always keeps named ones.

    last:    the newest n good ones (at least 2, because one may be damaged)
    every:   also every checkpoint whose step is a multiple of this
    epochs:  also every end-of-epoch checkpoint
    """

    last: int = 2
    every: int | None = None
    epochs: bool = False

    def __post_init__(self) -> None:
        if self.last < 2:
            raise ConfigError(
                f"keep={self.last}: keep at least 2, because the newest may be damaged; use keep=2",
                found=self.last,
            )
        if self.every is not None and self.every < 1:
            raise ConfigError(f"Keep(every={self.every}): give a number of steps of 1 or more", found=self.every)
