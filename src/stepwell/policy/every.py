"""Fixed frequencies.

Owns:    `Every` and `Never`, and the cadence, which asks any policy. The automatic one stands in `auto`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from stepwell.errors import ConfigError


@dataclass(frozen=True)
class Moment:
    """What a policy may look at: the present step, and what passed since the last snapshot."""

    step: int
    steps_since: int
    seconds_since: float
    epochs_since: int
    is_epoch_end: bool
    interval: float | None = None
    """Seconds of work after which an automatic snapshot is due; None: not now."""


class Policy(Protocol):
    """Answers whether a snapshot is due now."""

    def is_due(self, moment: Moment) -> bool:
        """Asked after every step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Every:
    """A snapshot every so many steps, seconds or epochs; with several given, whichever comes first."""

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.seconds, self.epochs) if value is not None]
        if not given or any(value <= 0 for value in given):
            raise ConfigError(
                f"{self}: give at least one of steps=, seconds=, epochs=, each above 0; Never() saves only when asked"
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
    """Only what the user saves, and the end of the run."""

    def is_due(self, moment: Moment) -> bool:
        """Never."""
        return False


def is_counted(policy: Policy) -> bool:
    """Whether it looks at steps and epochs alone: then all ranks find the same, without a word."""
    return isinstance(policy, Never) or (isinstance(policy, Every) and policy.seconds is None)


class Cadence:
    """A policy, and what passed since its last snapshot."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._at = time.monotonic()
        self.epochs = 0
        self.step = 0

    def is_due(self, step: int, *, is_epoch_end: bool, interval: float | None = None) -> bool:
        """Asked after every step."""
        seconds = time.monotonic() - self._at
        return self.policy.is_due(Moment(step, step - self.step, seconds, self.epochs, is_epoch_end, interval))

    def restart(self, step: int) -> None:
        """There is a snapshot of this step: count from here."""
        self.step, self._at, self.epochs = step, time.monotonic(), 0
