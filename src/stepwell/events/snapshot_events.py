"""Events of the copy of the state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class SnapshotRefused(Event):
    """The state cannot be saved as it is. stepwell checks again now and then, and logs again if the reason changes."""

    level: ClassVar[int] = logging.WARNING
    step: int
    reason: str

    def text(self) -> str:
        return f"NO checkpoint of step {self.step} and the following steps, until you fix this: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Outgrown(Event):
    """The state grows faster than memory for snapshots can be allocated in the background."""

    level: ClassVar[int] = logging.WARNING
    step: int
    nbytes: int
    seconds: float

    def text(self) -> str:
        return (
            f"The state ({self.nbytes / 1e6:.0f} MB) grows faster than stepwell can allocate memory for "
            f"snapshots: training waited {self.seconds:.1f} s for the snapshot of step {self.step}"
        )


@dataclass(frozen=True, kw_only=True)
class NothingBetween(Event):
    """An option for steps between checkpoints (`memory=`, `deltas=`) has no effect."""

    level: ClassVar[int] = logging.WARNING
    asked: str
    reason: str

    def text(self) -> str:
        return f"{self.asked} has no effect: {self.reason}"
