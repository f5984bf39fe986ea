"""What happens between ranks, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class Sharing(Event):
    """The ranks agreed on who stores what: tensors that are stored once for all, and those of rank 0's own."""

    ranks: int
    shared: int
    own: int


@dataclass(frozen=True, kw_only=True)
class NoAgent(Event):
    """The agent of a rank died again and again: without its parts there are no checkpoints."""

    level: ClassVar[int] = logging.ERROR
    of_rank: int

    def text(self) -> str:
        return f"rank {self.of_rank} has no agent any more: no rank writes checkpoints; see the log of that rank"


@dataclass(frozen=True, kw_only=True)
class SavedAlone(Event):
    """Not all ranks called `save()` after a step: that checkpoint is void."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: int
    missing: int

    def text(self) -> str:
        return (
            f"rank {self.missing} did not call save() after step {self.step}, and rank {self.by} did: this checkpoint "
            "is void; let all ranks call save(), without `if rank == 0`"
        )


@dataclass(frozen=True, kw_only=True)
class PoliciesDiffer(Event):
    """The ranks were not given the same policy: that of rank 0 holds for all of them."""

    level: ClassVar[int] = logging.WARNING
    of_rank: int
    name: str
    other: str
    first: str

    def text(self) -> str:
        given, first = f"{self.name}={self.other}", f"{self.name}={self.first}"
        return f"rank {self.of_rank} was given {given}, and rank 0 {first}: all ranks follow rank 0"


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """The connection to another rank ended."""

    level: ClassVar[int] = logging.WARNING
    rank: int
    host: str | None = None

    def text(self) -> str:
        where = "" if self.host is None else f", on {self.host},"
        return f"rank {self.rank}{where} is gone: its process ended, or its machine cannot be reached"
