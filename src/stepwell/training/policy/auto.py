"""The automatic interval, from the accepted overhead, the speed of storage and the failure rate.

Owns:    `Auto`, the user's limits, and `Tempo`, the interval that follows from them and from measurements.
Not:     the measuring (profile) and the formula (interval).
Holds:   the interval rises at once, but falls only after two decisions in a row. Each change is logged with its inputs
         and the term that limits it. No checkpoint begins before the last one is durable, so the interval follows the
         speed of storage at once. An early checkpoint that measures the current cost stays inside the limit too: if
         it cost as much as before, the next one comes later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from stepwell.errors import ConfigError
from stepwell.training.policy.every import Moment
from stepwell.training.policy.interval import Costs, Interval, choose
from stepwell.training.policy.profile import Profile

OVERHEAD: Final = 0.035
_UNKNOWN_SECONDS: Final = 60.0
"""The longest time without a checkpoint before the first measurement."""
_DEAD_BAND: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Save as often as the accepted overhead allows; less often with slow storage or rare failures.

    overhead:        share of the time that saving may cost
    mtbf:            first guess of the mean seconds between failures; stepwell learns from the failures of the run
    recovery_point:  limit for the seconds of lost work, if it can be met
    """

    overhead: float = OVERHEAD
    mtbf: float | None = None
    recovery_point: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.overhead <= 1:
            raise ConfigError(f"overhead={self.overhead!r}: give a share of the time, 0.035 for 3.5 %", name="overhead")
        for name in ("mtbf", "recovery_point"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: give seconds, above 0", name=name)

    def is_due(self, moment: Moment) -> bool:
        """Whether the work since the last checkpoint has reached the interval."""
        return moment.interval is not None and moment.seconds_since >= moment.interval


class Tempo:
    """The current interval. `decide` updates it; policies see `interval`."""

    def __init__(self, wishes: Auto, profile: Profile) -> None:
        self._wishes = wishes
        self._profile = profile
        self._falls = 0
        self._seen = 0
        self._least = self._least_before = self._owed = 0.0
        self.chosen: Interval | None = None
        self.costs: Costs | None = None

    @property
    def has_news(self) -> bool:
        """Whether something was measured since the last decision."""
        return self._profile.news != self._seen

    def decide(self, *, mtbf: float | None, restart: float) -> Interval | None:
        """Look at what was measured since. Returns the interval if it is another one than before."""
        if not self.has_news:
            return None
        self._seen = self._profile.news
        checkpoint, durable = self._profile.checkpoint, self._profile.durable
        if checkpoint is None or durable is None:
            return None
        self.costs = Costs(checkpoint, durable, restart, mtbf)
        found = self._choose(self.costs)
        self._least, self._least_before = max(found.least, self._least_before), found.least
        self._owed = min(self._owed, self._least)
        if self.chosen is not None:
            change = found.seconds - self.chosen.seconds
            self._falls = self._falls + 1 if change < 0 else 0
            if abs(change) <= _DEAD_BAND * self.chosen.seconds or 0 < self._falls < 2:
                return None
        self._falls = 0
        self.chosen = found
        return found

    def _choose(self, costs: Costs) -> Interval:
        return choose(costs, overhead=self._wishes.overhead, recovery_point=self._wishes.recovery_point)

    def begin(self) -> None:
        """A checkpoint was triggered. One that came early to find out is paid for by the next, if it was no cheaper."""
        trial = self._trial()
        self._owed = 0.0 if trial is None else min(self._least, self._owed + self._least - trial.least)

    def interval(self, *, is_writing: bool) -> float | None:
        """Seconds from one trigger to the next; None: not now, whatever passed.

        is_writing:  one is not durable yet, so storage would not keep up
        """
        if self._profile.is_resting:
            return None  # nothing to compare with any more
        if self.chosen is not None and self.costs is not None:
            trial = self._trial()
            least = self._least + self._owed if trial is None else trial.least
            return None if is_writing else least + self.costs.checkpoint  # what a checkpoint takes is no work
        is_known = self._profile.durable is not None and self._profile.checkpoint is not None
        return 0.0 if not is_known and self._profile.has_rhythm else _UNKNOWN_SECONDS

    def _trial(self) -> Interval | None:
        """The interval that would hold if something less were true of the costs, which is worth finding out."""
        hint = self._profile.hint
        if hint is None or self.costs is None:
            return None
        trial = self._choose(replace(self.costs, checkpoint=hint))
        return trial if trial.least < self._least else None

    @property
    def usual(self) -> float | None:
        """Seconds from one trigger to the next, by what storage usually needs; None before the first decision."""
        return None if self.chosen is None or self.costs is None else self.chosen.seconds + self.costs.checkpoint

    def explain(self) -> str:
        """The current interval and its reason, in one sentence."""
        if self.chosen is None or self.costs is None:
            return "stepwell is measuring the first checkpoint, and saves within a minute at the latest."
        iteration = self._profile.iteration
        return sentence(self.chosen, self.costs, bound=self._wishes.overhead, iteration=iteration)


def sentence(interval: Interval, costs: Costs, *, bound: float, iteration: float | None) -> str:
    """The interval and its reason, for a person."""
    every = f"Saving every {_seconds(interval.seconds)}"
    if iteration:
        count = max(1, round(interval.seconds / iteration))
        every = f"Saving every {'step' if count == 1 else f'{count} steps'} ({_seconds(interval.seconds)})"
    why = {
        "overhead": f"a save costs {_seconds(costs.checkpoint)}, the limit is {100 * bound:.3g} %",
        "storage": f"storage ({_seconds(costs.durable)} per save) is the limit",
        "failures": f"a save costs {_seconds(costs.checkpoint)}, the best trade-off for one failure per "
        f"{_seconds(costs.mtbf or 0)}",
        "recovery point": f"at most {_seconds(interval.at_risk)} of work may be lost",
    }[interval.term]
    text = f"{every}: {why}; predicted overhead {100 * interval.overhead:.2g} %."
    return f"{text} Not met: {interval.problem}." if interval.problem else text


def _seconds(value: float) -> str:
    for limit, unit, name in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (600.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 3600:.3g} h"
