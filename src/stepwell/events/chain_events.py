"""Events of a chain of lossy checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class ChainBegun(Event):
    """A base is committed; records that refer to it follow."""

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
        return f"Quantising parameters on {self.where} (Deltas(device=True)): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class BaseDue(Event):
    """The next step must be a checkpoint, whatever the policy says."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ChainEnded(Event):
    """A chain takes no more records; those it has stay."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "The chain of {base} ends: {reason}; {action}"
    base: str
    reason: str
    action: str = "the next checkpoint is a new base"


@dataclass(frozen=True, kw_only=True)
class Delta(Event):
    """A record is durable: it holds the change up to this step.

    kept: share of the entries that got a symbol. error: relative to the distance from the base. write_seconds: the
    part of `seconds` that storage took.
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
    """A step has no record: the previous one was still being written, or the values of the step are suspect."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lossy(Event):
    """The restored state is not bit-identical to the saved one."""

    level: ClassVar[int] = logging.WARNING
    step: int
    base: str
    records: int
    codec: str
    stopped: str | None = None

    def text(self) -> str:
        ended = "" if self.stopped is None else f"; {self.stopped}"
        records = f"{self.records} record{'' if self.records == 1 else 's'}"
        return f"Step {self.step} is lossy: {self.base} plus {records} of {self.codec}{ended}"


@dataclass(frozen=True, kw_only=True)
class ChainLeft(Event):
    """A chain reaches a later step than the restored checkpoint."""

    level: ClassVar[int] = logging.INFO
    step: int
    restored: int

    def text(self) -> str:
        lossy = "restore(prefer='newest') would continue from there"
        return f"Step {self.restored} is exact, but a lossy chain reaches step {self.step}: {lossy}"
