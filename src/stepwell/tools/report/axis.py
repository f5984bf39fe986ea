"""Time for a picture: seconds of training at full length, restarts cut to narrow strips.

A restart is mostly imports. Drawn to scale it would squeeze everything worth seeing into the corners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STRIP_SHARE = 0.03
_TICKS = 12


@dataclass(frozen=True)
class Gap:
    """A stretch of time in which nothing trained."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its real length."""
        return self.end - self.start


class TimeAxis:
    """Maps seconds since the first start to places on the axis. `gaps` in ascending order, without overlap."""

    def __init__(self, seconds: float, gaps: Sequence[Gap]) -> None:
        self.gaps = list(gaps)
        self.training = max(1e-9, seconds - sum(gap.seconds for gap in gaps))
        self._strip = _STRIP_SHARE * self.training
        self.end = max(self.training, self.place(seconds))

    def place(self, time: float) -> float:
        """Where a moment lies."""
        cut = 0.0
        for gap in self.gaps:
            if time <= gap.start:
                break
            strip = self._width(gap)
            if time < gap.end:
                return gap.start - cut + strip * (time - gap.start) / gap.seconds
            cut += gap.seconds - strip
        return time - cut

    def _width(self, gap: Gap) -> float:
        return min(gap.seconds, self._strip)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Places and labels at round numbers of seconds of training."""
        rough = self.training / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        places, labels = [], []
        for number in range(int(self.training / step) + 1):
            places.append(self._place_of_training(number * step))
            labels.append(f"{number * step:g}")
        return places, labels

    def _place_of_training(self, seconds: float) -> float:
        """Where so many seconds of training are reached."""
        time = seconds
        for gap in self.gaps:
            if time <= gap.start:
                break
            time += gap.seconds
        return self.place(time)
