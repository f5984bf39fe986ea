"""Sizes, ages and counts as people read them."""

from __future__ import annotations

import time
from datetime import datetime, timezone

_UNITS = ("kB", "MB", "GB", "TB", "PB")
_SPANS = ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h"), (60 * 86400, 86400, "days"))


def size(nbytes: int) -> str:
    """`1.2 GB`: three digits at most, decimal units."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = nbytes / 1000, 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if value < 9.95 else f"{value:.0f} {_UNITS[unit]}"


def span(seconds: float) -> str:
    """`3 min`, `2 h`, `5 days`. Less than nothing is a clock that differs: `0 s`."""
    seconds = max(0.0, seconds)
    for limit, unit, name in _SPANS:
        if seconds < limit:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds // (30 * 86400))} months"


def age(created: float, now: float | None = None) -> str:
    """How long ago."""
    return span((time.time() if now is None else now) - created)


def stamp(created: float) -> str:
    """ISO 8601 in UTC, for scripts."""
    return datetime.fromtimestamp(created, timezone.utc).isoformat(timespec="milliseconds")


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `3 directories`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
