"""Who is alive: a counter that stops changing belongs to a process that stopped.

Holds:   only this process's monotonic clock is read, and no clock of another machine is compared with it. Time counts
         only while we look: a pause of ours, or of the store, adds at most one step to everybody's silence, so that a
         process that wakes up after a minute does not find everybody else dead.
"""

from __future__ import annotations

from collections.abc import Mapping


class Pulse:
    """Remembers what was seen last, and for how long it has been the same."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._seen: dict[str, object] = {}
        self._silent: dict[str, float] = {}
        self._looked: float | None = None

    def look(self, values: Mapping[str, object], now: float) -> dict[str, float]:
        """Seconds of silence of everybody in `values`. Who is not in it is forgotten."""
        passed = 0.0 if self._looked is None else min(now - self._looked, self._step_seconds)
        silent = {}
        for name, value in values.items():
            is_same = name in self._seen and self._seen[name] == value
            silent[name] = self._silent[name] + passed if is_same else 0.0
        self._seen, self._silent, self._looked = dict(values), silent, now
        return silent
