"""What happens to checkpoints on their way through the levels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from stepwell.events import Event


@dataclass(frozen=True, kw_only=True)
class LevelsChosen(Event):
    """Nobody gave `levels=`, and the nodes have caches: where checkpoints go first, and what was measured for it.

    The seconds are of the slowest rank, for `nbytes` of each; None: that place could not be written.
    """

    level: ClassVar[int] = logging.INFO
    first: str
    nbytes: int
    node_seconds: float | None
    shared_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Protected(Event):
    """This rank holds for others what it has to."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Degraded(Event):
    """All ranks hold their parts of a checkpoint, but not all that was to protect it could be made."""

    level: ClassVar[int] = logging.WARNING
    step: int
    ranks: list[int]
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Flush(Event):
    """This rank's part of a checkpoint is in the shared place; said by rank 0, all of it is."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FlushFailed(Event):
    """A checkpoint could not be carried to the shared place; it stays on the nodes, and training goes on."""

    level: ClassVar[int] = logging.WARNING
    step: int
    error: str
    action: str


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """Somebody asked this node's agent for something it does not give."""

    level: ClassVar[int] = logging.WARNING
    kinds: dict[str, int]
