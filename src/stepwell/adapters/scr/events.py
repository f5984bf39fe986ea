"""What happens to datasets of the SCR interface, beside what happens to all checkpoints on their way."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events import Event


@dataclass(frozen=True, kw_only=True)
class ParameterIgnored(Event):
    """A parameter was set that has no effect here."""

    level: ClassVar[int] = logging.WARNING
    name: str
    reason: str


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
