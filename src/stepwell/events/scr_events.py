"""What happens to datasets of the SCR interface, beside what happens to all checkpoints on their way."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class ParameterIgnored(Event):
    """A parameter was set that has no effect here."""

    level: ClassVar[int] = logging.WARNING
    name: str
    reason: str

    def text(self) -> str:
        return f"{self.name} has no effect: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class NoInterval(Event):
    """The program asks whether a checkpoint is due, and nothing says how often. SCR never says yes then."""

    level: ClassVar[int] = logging.WARNING

    def text(self) -> str:
        return (
            "need_checkpoint() says yes every time, because none of SCR_CHECKPOINT_INTERVAL, SCR_CHECKPOINT_SECONDS "
            "and SCR_CHECKPOINT_OVERHEAD is set; SCR would say no"
        )


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """A dataset was named that there is not. SCR's calls succeed then, and do nothing."""

    level: ClassVar[int] = logging.WARNING
    call: str
    name: str

    def text(self) -> str:
        return f"{self.call}({self.name!r}): there is no such dataset; nothing was done"


@dataclass(frozen=True, kw_only=True)
class Output(Event):
    """A dataset is held by all ranks, and protected."""

    step: int
    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OutputDiscarded(Event):
    """A dataset came to nothing on all ranks; older ones stay."""

    level: ClassVar[int] = logging.WARNING
    step: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Passed(Event):
    """A dataset cannot be restarted from; the next older one is tried."""

    level: ClassVar[int] = logging.WARNING
    step: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """The program went on from a dataset."""

    level: ClassVar[int] = logging.INFO
    step: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Repaired(Event):
    """Something in this node's cache was damaged and is not used any more."""

    level: ClassVar[int] = logging.WARNING
    step: int
    what: str
