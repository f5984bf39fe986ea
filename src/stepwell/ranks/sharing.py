"""Which rank stores which part of the state, so that what several ranks hold is stored once.

Owns:    the verdict, as a pure function of what all ranks say of their leaves.
Not:     how they say it (claims), the rows (verdict), the tensors (state.share), the exchange (shared).
Holds:   every element of a tensor that counts as one for the run is stored by exactly one rank; the ranks that hold the
         same part share it evenly by bytes, each a range of rows; what differs between ranks under one name stays each
         rank's own. Work and memory grow with ranks x forms and with leaves, not with ranks x leaves; only digests are
         compared leaf by leaf, once for each text of digests among the ranks that hold the same part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stepwell.ranks import rank_sets
from stepwell.ranks.claims import DIGEST_BYTES, NO_DIGEST, Heard, Seen, pack_numbers
from stepwell.ranks.share_verdict import ALONE, FIRST_SET, OWN, ShareVerdict

Place = tuple[int, int]
"""A class of ranks, and a number there: of a leaf, or of a form."""
_OWN_KIND: Final = 0
"""The kind of leaves that are each rank's own."""


def share(heard: Sequence[Heard]) -> list[ShareVerdict]:
    """The verdict for each rank. Ranks that are told the same have the same object."""
    classes = _classes(heard)
    kinds, of_leaves = _Kinds(len(heard)), [[0] * len(part.names) for part in classes]
    for places, leaves in _columns(classes).items():
        column = _Column(heard, classes, places)
        found: dict[tuple[int, ...] | None, int] = {None: _OWN_KIND}
        for leaf in leaves:
            drifted = column.drifted(leaf)
            if drifted is not None and drifted not in found:
                found[drifted] = kinds.number(column, drifted)
            for part, index in leaf:
                of_leaves[part][index] = found[drifted]
    verdicts: dict[int, ShareVerdict] = {}
    for ranks, numbers in zip([part.ranks for part in classes], of_leaves, strict=True):
        verdicts.update(kinds.verdicts(ranks, numbers))
    return [verdicts[rank] for rank in range(len(heard))]


@dataclass
class _Class:
    """Ranks whose leaves have the same names, and are alike in the same way."""

    names: tuple[str, ...]
    forms: tuple[Seen, ...]
    column: tuple[int, ...]
    ranks: list[int] = field(default_factory=list)


def _classes(heard: Sequence[Heard]) -> list[_Class]:
    found: dict[tuple[int, ...], _Class] = {}
    for rank, (names, forms, column, *_) in enumerate(heard):
        key = id(names), id(forms), id(column)  # equal parts are the same object, and all of them are held
        found.setdefault(key, _Class(names, forms, column)).ranks.append(rank)
    return list(found.values())


def _columns(classes: Sequence[_Class]) -> dict[tuple[Place, ...], list[list[Place]]]:
    """Leaves by the forms that they have on all ranks, and of each leaf where it is in each class."""
    where: dict[str, list[Place]] = {}
    for number, part in enumerate(classes):
        for index, name in enumerate(part.names):
            where.setdefault(name, []).append((number, index))
    columns: dict[tuple[Place, ...], list[list[Place]]] = {}
    for leaf in where.values():
        forms = tuple((number, classes[number].column[index]) for number, index in leaf)
        columns.setdefault(forms, []).append(leaf)
    return columns


class _Column:
    """Leaves that are alike on each rank: who holds the same part of them."""

    def __init__(self, heard: Sequence[Heard], classes: Sequence[_Class], places: Sequence[Place]) -> None:
        self.groups: list[list[int]] = []
        self.is_still: list[bool] = []
        self._is_one = False
        self._several: dict[int, list[tuple[int, bytes]]] = {}
        seen = {number: classes[number].forms[form] for number, form in places}
        if len({form.kind for form in seen.values()}) > 1 or all(form.is_empty for form in seen.values()):
            return  # other tensors; or nobody would store it, and a record has to
        # Of parts that differ one counts only if they were meant to be copies: over other ranks it is another tensor,
        # as the optimizer of another pipeline stage has it under the same number.
        self._is_one = any(form.is_part for form in seen.values()) and len({form.mesh for form in seen.values()}) == 1
        found = [(rank, number, form) for number, form in places for rank in classes[number].ranks]
        if len(places) > 1:
            found.sort()
        groups: dict[bytes, list[tuple[int, int]]] = {}
        for rank, number, form in found:
            box = heard[rank].boxes[form * DIGEST_BYTES : (form + 1) * DIGEST_BYTES]
            groups.setdefault(box, []).append((rank, number))
        for group, ranks in enumerate(groups.values()):
            self.groups.append([rank for rank, _ in ranks])
            self.is_still.append(seen[ranks[0][1]].is_still)
            if len(ranks) > 1:  # ranks that say the same of all leaves count once
                texts = {(number, id(heard[rank].digests)): heard[rank].digests for rank, number in ranks}
                self._several[group] = [(number, digests) for (number, _), digests in texts.items()]

    def drifted(self, leaf: Sequence[Place]) -> tuple[int, ...] | None:
        """Groups that do not all hold the same content of this leaf. None: it is each rank's own."""
        if not self.groups:
            return None
        index = dict(leaf)
        drifted = tuple(number for number, texts in self._several.items() if not _is_equal(texts, index))
        return None if drifted and not self._is_one else drifted


def _is_equal(texts: Sequence[tuple[int, bytes]], index: Mapping[int, int]) -> bool:
    found = set()
    for part, digests in texts:
        start = index[part] * DIGEST_BYTES
        found.add(digests[start : start + DIGEST_BYTES])
    return len(found) == 1 and NO_DIGEST not in found


class _Kinds:
    """Kinds of leaves: those of one kind have the same holders, and become the same on each rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._codes: list[array[int]] = [array("I", [OWN]) * size]
        """Of each kind what becomes of it on each rank."""
        self._known = {self._codes[0].tobytes(): 0}
        self._sets: dict[tuple[tuple[int, ...], bool], int] = {}
        self._texts: list[tuple[str, bool]] = []

    def number(self, column: _Column, drifted: Sequence[int]) -> int:
        """Which kind leaves of this column are, where these groups have drifted apart."""
        codes = self._make(column, drifted)
        number = self._known.setdefault(codes.tobytes(), len(self._codes))
        if number == len(self._codes):
            self._codes.append(codes)
        return number

    def _make(self, column: _Column, drifted: Sequence[int]) -> array[int]:
        codes, apart = array("I", [OWN]) * self._size, set(drifted)
        for number, ranks in enumerate(column.groups):
            if len(ranks) > 1:  # copies of a part that drifted apart: one of them counts
                holders = ranks[:1] if number in apart else ranks
                code = self._set(tuple(holders), is_still=column.is_still[number])
                for rank in ranks:
                    codes[rank] = code
            if len(ranks) == 1 or number in apart:
                codes[ranks[0]] = ALONE
        return codes

    def _set(self, ranks: tuple[int, ...], *, is_still: bool) -> int:
        if (ranks, is_still) not in self._sets:
            self._sets[ranks, is_still] = FIRST_SET + len(self._texts)
            self._texts.append((rank_sets.write(ranks), is_still))
        return self._sets[ranks, is_still]

    def verdicts(self, ranks: Sequence[int], numbers: Sequence[int]) -> Iterator[tuple[int, ShareVerdict]]:
        """For ranks whose leaves are of these kinds, in the order of names."""
        used = sorted(set(numbers))
        place = {number: index for index, number in enumerate(used)}
        kinds = pack_numbers([place[number] for number in numbers])
        known: dict[tuple[int, ...], ShareVerdict] = {}
        for rank in ranks:
            codes = tuple(self._codes[number][rank] for number in used)
            if codes not in known:
                mine = sorted({code for code in codes if code >= FIRST_SET})
                here = {code: FIRST_SET + index for index, code in enumerate(mine)}
                texts = tuple(self._texts[code - FIRST_SET] for code in mine)
                known[codes] = ShareVerdict(kinds, tuple(here.get(code, code) for code in codes), texts)
            yield rank, known[codes]
