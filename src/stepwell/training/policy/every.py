"""Fixed intervals.

Owns:    `Every` and `Never`, and the cadence, which asks any policy.
Not:     the automatic interval (auto).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Protocol

from stepwell.errors import ConfigError


@dataclass(frozen=True)
class Moment:
    """The input of a policy: the current step, and the time since the last snapshot."""

    step: int
    steps_since: int
    seconds_since: float
    epochs_since: int
    is_epoch_end: bool
    interval: float | None = None
    """Seconds of work after which an automatic snapshot is due; None: not now."""


class Policy(Protocol):
    """Decides whether a snapshot is due now."""

    def is_due(self, moment: Moment) -> bool:
        """Called after every step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Every:
    """Save every n steps, seconds or epochs; with several limits, whichever is reached first."""

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.seconds, self.epochs) if value is not None]
        whole = [value for value in (self.steps, self.epochs) if value is not None]
        if not given or not all(value > 0 for value in given) or any(value % 1 for value in whole):
            raise ConfigError(
                f"{self}: give at least one of steps=, seconds=, epochs=, each above 0; Never() saves on request only"
            )

    def is_due(self, moment: Moment) -> bool:
        """Whether one of the limits is reached."""
        return bool(
            (self.steps is not None and moment.steps_since >= self.steps)
            or (self.seconds is not None and moment.seconds_since >= self.seconds)
            or (self.epochs is not None and moment.is_epoch_end and moment.epochs_since + 1 >= self.epochs)
        )


@dataclass(frozen=True)
class Never:
    """Save only on request, and at the end of the run."""

    def is_due(self, moment: Moment) -> bool:
        """Never."""
        return False


def is_counted(policy: Policy) -> bool:
    """Whether it looks at steps and epochs alone: then all ranks find the same, without a word."""
    return isinstance(policy, Never) or (isinstance(policy, Every) and policy.seconds is None)


class Elsewhere:
    """Rank 0 decides."""

    def is_due(self, moment: Moment) -> bool:
        """Not by this rank."""
        return False


def tell(policy: Policy) -> list[Any]:
    """A policy as it travels to other ranks: for a person, whether all ranks count by it, and its limits if so."""
    text = repr(policy) if is_dataclass(type(policy)) else type(policy).__qualname__
    return [text, is_counted(policy), asdict(policy) if isinstance(policy, Every) else {}]


def follow(told: list[Any]) -> Policy:
    """The policy of a rank that goes by what rank 0 told."""
    _, is_everywhere, limits = told
    if not is_everywhere:
        return Elsewhere()
    return Every(**limits) if limits else Never()


class Cadence:
    """A policy, and what passed since its last snapshot."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._at = time.monotonic()
        self._epochs = 0
        self.step = 0

    def is_due(self, step: int, *, is_epoch_end: bool, interval: float | None = None) -> bool:
        """Called after every step."""
        seconds = time.monotonic() - self._at
        return self.policy.is_due(Moment(step, step - self.step, seconds, self._epochs, is_epoch_end, interval))

    def begin_epoch(self) -> None:
        """Another epoch begins."""
        self._epochs += 1

    def restart(self, step: int, *, is_epoch_end: bool = False) -> None:
        """There is a snapshot of this step: count from here. The epoch that it ends does not count."""
        self.step, self._at, self._epochs = step, time.monotonic(), -1 if is_epoch_end else 0
