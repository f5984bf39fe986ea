"""What the script set before anything was restored: learning rates, schedules, and the like.

Owns:    the plain values of tracked optimizers and other small objects, and what differs between two starts.
Holds:   a checkpoint's values always win at a restore; that the script was changed meanwhile shows only here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stepwell.training.state.tracked import Tracked

Settings = dict[str, Any]
"""By place, such as `optimizer.param_groups.0.lr`."""
_MOST: Final = 64
"""Values of one object."""
_LONGEST: Final = 8
"""A longer list is data."""


def settings(tracked: Sequence[Tracked]) -> Settings:
    """Of all tracked objects but modules. What an object cannot tell yet is left out."""
    found: Settings = {}
    for item in tracked:
        if item.module is not None:
            continue
        with contextlib.suppress(Exception):  # the user's code: whatever is wrong with it, the first save reports
            pairs = _plain(_settings_of(item), item.name)
            found.update(pair for pair, _ in zip(pairs, range(_MOST), strict=False))
    return found


def _settings_of(item: Tracked) -> Any:
    if item.optimizer is None:
        return item.state()
    groups = item.optimizer.param_groups
    return {"param_groups": [{name: group[name] for name in group if name != "params"} for group in groups[:_LONGEST]]}


def _plain(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if value is None or isinstance(value, bool | int | float | str):
        yield place, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _plain(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST:
        for number, inner in enumerate(value):
            yield from _plain(inner, f"{place}.{number}")


def differences(before: Any, script: Settings, in_use: Settings) -> list[str]:
    """One line for each value that the script sets differently than it did `before`. `in_use`: after the restore."""
    if not isinstance(before, dict):
        return []  # an older checkpoint, which does not know
    return [
        f"{place} was {before[place]!r}, is {value!r} in the script, and stays {in_use[place]!r}"
        for place, value in script.items()
        if place in before and before[place] != value and place in in_use and in_use[place] != value
    ]
