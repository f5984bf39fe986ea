"""What all ranks said in one round, as one value in which equal lines stand once.

Owns:    the form: a line of JSON that says who said what, and then each different line. A message is lines of JSON.
Not:     how it travels (rounds).
Holds:   equal votes of any number of ranks take some hundred bytes. What arrives is checked against the number of ranks
         before room is made for it; equal messages come back as one object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain

Run = list[int]
"""First number, step (0 or 1) and count: `5, 5, 5` or `5, 6, 7`."""


def join(messages: Sequence[bytes]) -> bytes:
    """All messages, in rank order; all have the same number of lines."""
    header: list[tuple[int, list[Run]]] = []
    lines: list[bytes] = []
    for column in zip(*(message.split(b"\n") for message in messages), strict=True):
        numbers: dict[bytes, int] = {}
        runs = _runs(numbers.setdefault(line, len(numbers)) for line in column)
        header.append((len(numbers), runs))
        lines += numbers
    return b"\n".join([json.dumps(header, separators=(",", ":")).encode(), *lines])


def split(joined: bytes, size: int) -> list[bytes]:
    """What `join` was given. Raises ValueError if these are not the messages of `size` ranks."""
    first, *lines = joined.split(b"\n")
    columns, start = [], 0
    for count, runs in _header(first):
        if sum(run[2] for run in runs) != size or start + count > len(lines):
            raise ValueError(f"what the ranks said is not that of {size} ranks")
        columns.append((lines[start : start + count], runs))
        start += count
    differing = [number for number, (column, _) in enumerate(columns) if len(column) > 1] or [0]
    if len(differing) == 1:  # as almost always: ranks are in the same call
        column, runs = columns[differing[0]]
        before, after = (
            [each[0][0] for each in part] for part in (columns[: differing[0]], columns[differing[0] + 1 :])
        )
        return _spread([b"\n".join([*before, line, *after]) for line in column], runs)
    rows = list(zip(*(_spread(column, runs) for column, runs in columns), strict=True))
    made = {parts: b"\n".join(parts) for parts in dict.fromkeys(rows)}
    return [made[parts] for parts in rows]


def _header(line: bytes) -> list[tuple[int, list[Run]]]:
    """Of each column how many different lines it has, and who said which. Raises ValueError for nonsense."""
    try:
        found = json.loads(line)
        good = bool(found) and all(
            {type(count), *map(type, chain.from_iterable(runs))} == {int}
            and all(
                0 <= first <= first + step * (times - 1) < count and step in (0, 1) and times > 0
                for first, step, times in runs
            )
            for count, runs in found
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(f"who said what is not of its form: {error}") from None
    if not good:
        raise ValueError("who said what is not of its form")
    return [(count, runs) for count, runs in found]


def _runs(numbers: Iterable[int]) -> list[Run]:
    runs: list[Run] = []
    for number in numbers:
        if runs:
            run = runs[-1]
            if run[2] == 1 and number == run[0] + 1:
                run[1] = 1
            if number == run[0] + run[1] * run[2]:
                run[2] += 1
                continue
        runs.append([number, 0, 1])
    return runs


def _spread(lines: Sequence[bytes], runs: Iterable[Run]) -> list[bytes]:
    """The line of each rank."""
    found: list[bytes] = []
    for first, step, times in runs:
        found += lines[first : first + times] if step else [lines[first]] * times
    return found
