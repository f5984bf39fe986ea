"""What a rank is told of who stores what, and which rows of its leaves that makes its own.

Owns:    the verdict for one rank, how it travels, and the cuts, which each rank works out for itself: it holds all that
         the other ranks of a set hold of the same leaves.
Not:     how the verdict is found (sharing).
Holds:   ranks that store the same in the same way are told the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stepwell.ranks import rank_sets as sets
from stepwell.ranks.claims import Claims, Form, Message, pack, unpack, unpack_numbers

Rows = tuple[int, int, str]
"""Of the part of a leaf that a rank holds, the rows it stores, [first, last), and who holds the same part: `0-2`."""
Shares = dict[str, Rows]
"""What one rank stores of each leaf that belongs to all. A leaf that is not named is its own, and stored whole."""
OWN: Final = 0
ALONE: Final = 1
FIRST_SET: Final = 2
"""What becomes of a leaf here: it is this rank's own; it alone stores it for all; from here on the number of the set
that stores it together. A set of one rank is another one, which stores it alone.
"""


@dataclass(frozen=True)
class ShareVerdict:
    """For one rank.

    kinds:  of each leaf, in the order of names, which kind it is of
    codes:  what becomes of each kind
    sets:   who holds the same, and whether it is still
    """

    kinds: bytes
    codes: tuple[int, ...]
    sets: tuple[tuple[str, bool], ...]

    def dump(self) -> Message:
        """As it travels."""
        return {"kinds": pack(self.kinds), "codes": pack(json.dumps([self.codes, self.sets]).encode())}

    @classmethod
    def load(cls, message: Message) -> ShareVerdict:
        """Raises ValueError."""
        codes, holders = json.loads(unpack(message["codes"]))
        return cls(unpack(message["kinds"]), tuple(codes), tuple((text, is_still) for text, is_still in holders))

    @property
    def own_count(self) -> int:
        """How many leaves stay this rank's own."""
        return sum(self.codes[kind] == OWN for kind in unpack_numbers(self.kinds))

    def rows(self, claims: Claims, rank: int) -> Shares:
        """What this rank stores. Raises ValueError for a verdict on other leaves."""
        kinds = unpack_numbers(self.kinds)
        if len(kinds) != len(claims.names):
            raise ValueError(f"a verdict on {len(kinds)} leaves for a rank that has {len(claims.names)}")
        shares: Shares = {}
        together: dict[int, list[tuple[str, Form]]] = {}
        for (name, form), kind in zip(claims.leaves, kinds, strict=True):
            code = self.codes[kind]
            if code == ALONE:
                shares[name] = (0, form.box.row_count, "")
            elif code != OWN:
                together.setdefault(code - FIRST_SET, []).append((name, form))
        for number, leaves in together.items():
            holders = sets.read(self.sets[number][0])
            one = {name: (0, 0, "") for name, _ in leaves}
            shares |= _split(holders, leaves, rank) if len(holders) > 1 else one
        return shares

    @property
    def partners(self) -> list[int]:
        """All ranks that store something of what this rank shares with others."""
        return sorted({rank for text, _ in self.sets for rank in sets.storing(sets.read(text))})


def _split(holders: Sequence[int], leaves: Sequence[tuple[str, Form]], rank: int) -> Shares:
    """The part of the bytes of all leaves, as they follow each other, that is this rank's, cut between rows."""
    label, storing = sets.label(holders), sets.storing(holders)
    if rank not in storing:
        return {name: (0, 0, label) for name, _ in leaves}
    number, count = storing.index(rank), len(storing)
    total = sum(form.row_bytes * form.box.row_count for _, form in leaves)
    begin, end = total * number // count, total * (number + 1) // count
    shares, position = {}, 0
    for name, form in leaves:
        rows, row_bytes = form.box.row_count, form.row_bytes
        first = 0 if not number else _row(begin - position, rows, row_bytes)
        last = rows if number + 1 == count else _row(end - position, rows, row_bytes)
        shares[name] = (first, last, label)
        position += rows * row_bytes
    return shares


def _row(into: int, rows: int, row_bytes: int) -> int:
    """The first row of a leaf that begins so many bytes into it, or later."""
    return min(rows, max(0, -(-into // row_bytes))) if row_bytes else 0
