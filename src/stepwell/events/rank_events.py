"""Events between ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class Sharing(Event):
    """The ranks agreed on who stores what: how many tensors all share, and how many belong to rank 0 alone."""

    ranks: int
    shared: int
    own: int


@dataclass(frozen=True, kw_only=True)
class NoAgent(Event):
    """The agent of a rank keeps dying. Without its parts there are no checkpoints."""

    level: ClassVar[int] = logging.ERROR
    of_rank: int

    def text(self) -> str:
        return f"The agent of rank {self.of_rank} keeps dying: no rank writes checkpoints; see the log of that rank"


@dataclass(frozen=True, kw_only=True)
class SavedAlone(Event):
    """Not all ranks called `save()` after a step, so that checkpoint is void."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: int
    missing: int

    def text(self) -> str:
        return (
            f"Rank {self.missing} did not call save() after step {self.step}, but rank {self.by} did: this checkpoint "
            "is void. Call save() on all ranks, without `if rank == 0`"
        )


@dataclass(frozen=True, kw_only=True)
class PoliciesDiffer(Event):
    """The ranks have different policies: all follow rank 0."""

    level: ClassVar[int] = logging.WARNING
    of_rank: int
    name: str
    other: str
    first: str

    def text(self) -> str:
        given, first = f"{self.name}={self.other}", f"{self.name}={self.first}"
        return f"Rank {self.of_rank} has {given}, but rank 0 has {first}: all ranks follow rank 0"


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """The connection to another rank ended."""

    level: ClassVar[int] = logging.WARNING
    rank: int
    host: str | None = None

    def text(self) -> str:
        where = "" if self.host is None else f" on {self.host}"
        return f"Lost rank {self.rank}{where}: its process ended, or its machine cannot be reached"
