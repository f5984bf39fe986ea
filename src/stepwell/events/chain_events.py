"""What happens to a chain of lossy checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class ChainBegun(Event):
    """A base is committed, and records against it follow."""

    base: str
    codec: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Coding(Event):
    """Where parameters are quantised from now on (`Deltas(device=True)`)."""

    where: str
    reason: str

    def severity(self) -> int:
        return logging.WARNING if self.where == "host" else logging.DEBUG

    def text(self) -> str:
        return f"Deltas(device=True): parameters are quantised on {self.where}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class BaseDue(Event):
    """The next step is to be a checkpoint, whatever the policy says."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ChainEnded(Event):
    """No more records go to a chain; what is in it stays."""

    level: ClassVar[int] = logging.WARNING
    base: str
    reason: str
    action: str = "the next checkpoint is a new base"


@dataclass(frozen=True, kw_only=True)
class Delta(Event):
    """A record is durable: what changed up to this step. kept: part of the entries that got a symbol; error: what is
    missing, relative to the way from the base. write_seconds: the part of `seconds` that storage took.
    """

    step: int
    base: str
    number: int
    sort: str
    nbytes: int
    kept: float
    error: float
    seconds: float
    write_seconds: float


@dataclass(frozen=True, kw_only=True)
class DeltaSkipped(Event):
    """A step is in no record: the one before was still on its way, or its values are not to be trusted."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lossy(Event):
    """What was restored is not the state to the bit."""

    level: ClassVar[int] = logging.WARNING
    step: int
    base: str
    records: int
    codec: str
    stopped: str | None = None

    def text(self) -> str:
        ended = "" if self.stopped is None else f"; {self.stopped}"
        records = f"{self.records} record{'' if self.records == 1 else 's'}"
        return f"step {self.step} is lossy: {self.base} and {records} of {self.codec}{ended}"


@dataclass(frozen=True, kw_only=True)
class ChainLeft(Event):
    """A chain reaches further than the checkpoint that was restored."""

    level: ClassVar[int] = logging.INFO
    step: int
    restored: int

    def text(self) -> str:
        lossy = "restore(prefer='newest') would have gone on from there"
        return f"step {self.restored} is exact; a lossy chain reaches step {self.step}: {lossy}"
