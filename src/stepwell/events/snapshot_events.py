"""What becomes of a state that is to be copied, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class SnapshotRefused(Event):
    """The state cannot be saved as it is. Looked at again now and then; said again if the reason changes."""

    level: ClassVar[int] = logging.WARNING
    step: int
    reason: str

    def text(self) -> str:
        return f"NO checkpoint of step {self.step}, and none of the next ones while this stays so: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Outgrown(Event):
    """The state grows faster than memory for a snapshot is made ready beside training."""

    level: ClassVar[int] = logging.WARNING
    step: int
    nbytes: int
    seconds: float

    def text(self) -> str:
        return (
            f"the state ({self.nbytes / 1e6:.0f} MB) outgrows the memory for snapshots faster than it is made ready: "
            f"training waited {self.seconds:.1f} s for the snapshot of step {self.step}"
        )


@dataclass(frozen=True, kw_only=True)
class NothingBetween(Event):
    """What is asked for between checkpoints (`memory=`, `deltas=`) has no effect."""

    level: ClassVar[int] = logging.WARNING
    asked: str
    reason: str

    def text(self) -> str:
        return f"{self.asked} has no effect: {self.reason}"
