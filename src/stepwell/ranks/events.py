"""What happens between ranks, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events import Event


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
class RankLost(Event):
    """The connection to another rank ended."""

    level: ClassVar[int] = logging.WARNING
    rank: int

    def text(self) -> str:
        return f"rank {self.rank} is gone: its process ended, or its machine cannot be reached"
