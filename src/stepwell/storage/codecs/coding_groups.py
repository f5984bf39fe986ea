"""Groups of a part: which table each is coded with, and what came of it, wherever the symbols are made.

Owns:    the four kinds of a group, when a table is used again, and `Coded`, the symbols of a part before they shrink.
Before:  `quantise`, or kernels on a device, make symbols.   After: `parts` makes a section of `Coded`.
Holds:   host and device decide alike: from counts and the largest difference, never from the order of anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stepwell.storage.codecs.assignment import CodedSlot
from stepwell.storage.codecs.floats import Bytes
from stepwell.storage.codecs.quantise import Outcome, packed_nbytes
from stepwell.storage.codecs.sparse import Sparse
from stepwell.storage.codecs.tables import QuantiserTable

SAME, FRESH, AGAIN, EXACT = range(4)
"""Of a group: nothing changed; coded with a table that follows; with the table of the record before; as it is."""
MOST_AGE: Final = 8
"""A table is made anew after so many records at the latest."""
_SHIFT: Final = 0.2


@dataclass
class KeptGroups:
    """A group's table, how many entries it kept when it was made, and for how many records it was used."""

    table: QuantiserTable
    kept: int
    age: int = 0
    is_stale: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the next record may use it."""
        return not self.is_stale and self.age < MOST_AGE

    def used(self, outcome: Outcome, *, is_new: bool) -> KeptGroups:
        """What is kept after a record that was coded with it."""
        usual = outcome.kept if is_new else self.kept
        is_stale = abs(outcome.kept - usual) > _SHIFT * max(usual, 1) or outcome.largest >= self.table.reach
        return KeptGroups(self.table, usual, 0 if is_new else self.age + 1, is_stale)


@dataclass
class Facts:
    """For reports. entries: quantised ones; kept: those with a symbol; exact: groups that could not be coded."""

    entries: int = 0
    kept: int = 0
    exact: int = 0
    reused: int = 0

    def add(self, other: Facts) -> None:
        self.entries, self.kept = self.entries + other.entries, self.kept + other.kept
        self.exact, self.reused = self.exact + other.exact, self.reused + other.reused


@dataclass
class Coded:
    """A part's groups in order. heads: kind of each, with its table if that is new. packed: symbols of the coded ones;
    empty where they came as `sparse`. exact: values of those that could not be coded.
    """

    heads: bytearray = field(default_factory=bytearray)
    packed: list[Bytes] = field(default_factory=list)
    sparse: Sparse | None = None
    exact: list[bytes] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    is_same: bool = True

    def add(self, kind: int, table: QuantiserTable | None, exact: Sequence[bytes]) -> None:
        """The next group; of its arguments those that its kind needs are looked at. Its symbols come apart."""
        self.is_same = self.is_same and kind == SAME
        self.heads.append(kind)
        if kind == FRESH and table is not None:
            self.heads += struct.pack(f"<B{len(table.heads)}H", len(table.heads), *table.heads)
        if kind == EXACT:
            self.exact += exact
        self.facts.exact += kind == EXACT
        self.facts.reused += kind == AGAIN


def group_nbytes(slots: Sequence[CodedSlot], bits: int) -> int:
    """Bytes of a group's packed symbols."""
    return sum(packed_nbytes(slot.leaf.count, bits) for slot in slots)
