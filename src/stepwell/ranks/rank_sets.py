"""Sets of ranks: how they are written, and which ranks of a set store what all of it holds.

Holds:   the same set is always written alike, and two sets never have the same text. Labels are only compared within
         one checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stepwell.storage.format.checksum import block_digest

MOST_STORING: Final = 64
"""Ranks that store parts of what one set holds: each further one is one more file to open in every restore."""
_LONGEST_LABEL: Final = 64


def write(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: `3`, `0-7,16-23`, `1-1021/4`."""
    found, start = [], 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start + 1
        while step and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if step != 1 and end - start < 3:
            end = start + 1
        found.append(_range(ranks[start], ranks[end - 1], step))
        start = end
    return ",".join(found)


def _range(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last}/{step}"


def read(text: str) -> list[int]:
    """The ranks of a text that `write` made. Raises ValueError for any other."""
    ranks: list[int] = []
    for part in text.split(","):
        ends, _, step = part.partition("/")
        first, _, last = ends.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return ranks


def label(ranks: Sequence[int]) -> str:
    """How records and errors name a set, in few characters."""
    text = write(ranks)
    if len(text) <= _LONGEST_LABEL:
        return text
    return f"{ranks[0]} and {len(ranks) - 1} more #{block_digest(text.encode())[:8]}"


def storing(holders: Sequence[int]) -> Sequence[int]:
    """Which holders of a part store rows of it: all, or as many as are allowed, evenly spread over them."""
    if len(holders) <= MOST_STORING:
        return holders
    return [holders[number * len(holders) // MOST_STORING] for number in range(MOST_STORING)]
