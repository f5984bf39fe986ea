"""Events of datasets of the SCR interface, besides those of all checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class ParameterIgnored(Event):
    """A parameter that is set has no effect here."""

    level: ClassVar[int] = logging.WARNING
    name: str
    reason: str

    def text(self) -> str:
        return f"{self.name} has no effect: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class NoInterval(Event):
    """The program asks whether a checkpoint is due, but no interval is set. SCR would never answer yes."""

    level: ClassVar[int] = logging.WARNING

    def text(self) -> str:
        return (
            "need_checkpoint() returns yes every time, because none of SCR_CHECKPOINT_INTERVAL, "
            "SCR_CHECKPOINT_SECONDS and SCR_CHECKPOINT_OVERHEAD is set; SCR would return no"
        )


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """The program named a dataset that does not exist. SCR's calls succeed then and do nothing."""

    level: ClassVar[int] = logging.WARNING
    call: str
    name: str

    def text(self) -> str:
        return f"{self.call}({self.name!r}) did nothing: there is no such dataset"


@dataclass(frozen=True, kw_only=True)
class Output(Event):
    """All ranks hold their parts of a dataset, and it is protected."""

    step: int
    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OutputDiscarded(Event):
    """All ranks discarded a dataset; older ones stay."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Discarded the dataset {name} of step {step} on all ranks: {reason}"
    step: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Passed(Event):
    """A restart from this dataset failed; stepwell tries the next older one."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Cannot restart from the dataset {name} of step {step}: {reason}; trying the next older one"
    step: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """The program restarted from a dataset."""

    level: ClassVar[int] = logging.INFO
    line: ClassVar[str] = "Restarted from the dataset {name} of step {step}"
    step: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Repaired(Event):
    """Something in this node's cache was damaged and is no longer used."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Removed from the cache of this node, step {step}: {what}"
    step: int
    what: str
