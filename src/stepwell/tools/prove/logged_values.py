"""The logged values of two runs, step by step.

Owns:    what "equal" means for them: every time the killed run did a step, it logged what the uninterrupted one had
         logged, bit for bit; and in the end nothing is missing and nothing is new.
Holds:   a trainer writes its events by a thread of its own, so a kill may take the last values of a lineage along: each
         lineage counts as far as it got, and what is missing from there up to where the next one resumed is `lost`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from stepwell.tools.prove.trial_facts import EventLine

_Key = tuple[int, str]
_Logged = Mapping[_Key, list[str]]
NOTHING = "nothing"


@dataclass(frozen=True)
class LogDifference:
    """The first step at which a logged value differs. `lineage` of the killed run; None if it never logged it."""

    step: int
    name: str
    uninterrupted: str
    killed: str
    lineage: int | None


@dataclass(frozen=True)
class LogComparison:
    """How many steps and values there were, how many the killed run logged in all, how many of its own died with
    it, and what differs (by name: in how many steps).
    """

    steps: int
    values: int
    repeated: int
    lost: int
    first: LogDifference | None
    names: dict[str, int]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs. True as well if nothing was logged."""
        return self.first is None


def compare_logs(
    uninterrupted: Iterable[EventLine],
    killed: Iterable[EventLine],
    *,
    resumed: Mapping[int, int],
    ignore: Collection[str] = (),
) -> LogComparison:
    """Compare all logged values.

    resumed:  lineage of the killed run -> step at which it began
    ignore:   names that differ by nature, such as times
    """
    (expected, *_), found = _by_lineage(uninterrupted, ignore).values() or [{}], _by_lineage(killed, ignore)
    missing = list(_missing(expected, found))
    died = _died(found, resumed)
    lost = [item for item in missing if any(first <= item.step <= last for first, last in died)]
    differences = [*_differences(expected, found), *(item for item in missing if item not in lost)]
    names: dict[str, set[int]] = defaultdict(set)
    for difference in differences:
        names[difference.name].add(difference.step)
    return LogComparison(
        steps=len({step for step, _ in expected}),
        values=sum(map(len, expected.values())),
        repeated=sum(len(values) for logged in found.values() for values in logged.values()),
        lost=len(lost),
        first=min(differences, key=lambda item: (item.step, item.lineage or 0), default=None),
        names={name: len(steps) for name, steps in sorted(names.items())},
    )


def compare_ranks(
    uninterrupted: Sequence[Iterable[EventLine]],
    killed: Sequence[Iterable[EventLine]],
    *,
    resumed: Mapping[int, int],
    ignore: Collection[str] = (),
) -> LogComparison:
    """Compare the logged values of all ranks, each with its own: a killed rank's last words are lost with it alone."""
    pairs = zip(uninterrupted, killed, strict=True)
    found = [compare_logs(*pair, resumed=resumed, ignore=ignore) for pair in pairs]
    firsts = [(rank, each.first) for rank, each in enumerate(found) if each.first is not None]
    rank, first = min(firsts, key=lambda item: item[1].step, default=(0, None))
    names: dict[str, int] = defaultdict(int)
    for each in found:
        for name, steps in each.names.items():
            names[name] = max(names[name], steps)
    return LogComparison(
        steps=max(each.steps for each in found),
        values=sum(each.values for each in found),
        repeated=sum(each.repeated for each in found),
        lost=sum(each.lost for each in found),
        first=first if first is None or not rank else replace(first, name=f"{first.name} (rank {rank})"),
        names=dict(names),
    )


def _by_lineage(lines: Iterable[EventLine], ignore: Collection[str]) -> dict[int, _Logged]:
    """Lineage -> (step, name) -> values in the order they were logged, as text that is exact and knows NaN."""
    found: dict[int, dict[_Key, list[str]]] = {}
    for event in lines:
        if event["kind"] == "log":
            logged = found.setdefault(event["lineage"], defaultdict(list))
            for name, value in event["values"].items():
                if name not in ignore:
                    logged[event["step"], name].append(json.dumps(value, sort_keys=True))
    return dict(found)


def _differences(expected: _Logged, found: Mapping[int, _Logged]) -> Iterator[LogDifference]:
    """Values that the uninterrupted run did not log, or not like this."""
    for lineage, logged in found.items():
        for (step, name), values in logged.items():
            wanted = expected.get((step, name), [])
            for position, value in enumerate(values):
                if position >= len(wanted) or wanted[position] != value:
                    shown = wanted[position] if position < len(wanted) else NOTHING
                    yield LogDifference(step, name, shown, value, lineage)
                    break


def _missing(expected: _Logged, found: Mapping[int, _Logged]) -> Iterator[LogDifference]:
    """Values that no lineage logged."""
    for (step, name), wanted in expected.items():
        seen = max((len(logged.get((step, name), ())) for logged in found.values()), default=0)
        if seen < len(wanted):
            yield LogDifference(step, name, wanted[seen], NOTHING, None)


def _died(found: Mapping[int, _Logged], resumed: Mapping[int, int]) -> list[tuple[int, int]]:
    """For each lineage but the last: from its last line to the step where the next one resumed."""
    numbers = sorted(resumed)
    last = {number: max((step for step, _ in found.get(number, ())), default=resumed[number]) for number in numbers}
    return [(last[number], resumed[after]) for number, after in pairwise(numbers)]
