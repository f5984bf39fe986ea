"""The reader's state of a whole chain: one array for each part, what records are applied to and digests are taken of.

Holds:   the digest covers every byte of the state (`signature` says how well). Of parts that records never change, or
         that another device has, a writer keeps the digest alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from stepwell.errors import StateError
from stepwell.storage.codecs.assignment import CodedPart, CodedSlot, State, as_bytes, flat
from stepwell.storage.codecs.floats import AnyArray
from stepwell.storage.codecs.signature import part_digest, signature, state_digest


class ChainImage:
    """State of all parts. Constructing makes room for it, filled with zeros. `away`: digests of parts, by number, that
    there is no room for: their leaves are in no state that comes or goes. `threads`: those that take digests.
    """

    def __init__(self, parts: Sequence[CodedPart], away: Mapping[int, bytes] | None = None) -> None:
        self.parts, self.away, self.threads = tuple(parts), dict(away or {}), 1
        self._slots = [() if number in self.away else part.slots for number, part in enumerate(self.parts)]
        self.arrays: list[AnyArray] = [
            np.zeros(part.size if slots else 0, np.float32 if part.is_floats else np.uint8)
            for part, slots in zip(self.parts, self._slots, strict=True)
        ]

    @classmethod
    def of(cls, parts: Sequence[CodedPart], state: State, away: Collection[int]) -> ChainImage:
        """A state; of some parts the digests alone, which are taken without a copy. Raises StateError."""
        values = _split(parts, [part.slots for part in parts], state)
        digests = {}
        for number in away:
            pieces = [as_bytes(value) for value in values[number]]
            digests[number] = part_digest(sum(piece.size for piece in pieces), signature(*pieces))
        image = cls(parts, digests)
        image.fill([[] if number in digests else line for number, line in enumerate(values)])
        return image

    def without(self, numbers: Collection[int]) -> ChainImage:
        """The same with the digests alone of some parts. The other arrays are shared."""
        image = ChainImage(self.parts, {number: self._part_digest(number) for number in numbers})
        image.arrays = [array[:0] if number in numbers else array for number, array in enumerate(self.arrays)]
        return image

    def split(self, state: State) -> list[list[AnyArray]]:
        """Values of a state by part and leaf, in one dimension each. Raises StateError if they are not those leaves;
        those there is no room for may be missing.
        """
        return _split(self.parts, self._slots, state)

    def fill(self, values: Sequence[Sequence[AnyArray]]) -> None:
        """Take over values as they are."""
        for slots, array, pieces in zip(self._slots, self.arrays, values, strict=True):
            for slot, piece in zip(slots, pieces, strict=True):
                array[slot.start : slot.start + piece.size] = piece

    def digest(self) -> bytes:
        """Of the whole state."""
        return state_digest(self._part_digest(number) for number in range(len(self.parts)))

    def settle(self, numbers: Collection[int]) -> None:
        """From here on these parts stay as they are: their digests are taken now, and not again."""
        self.away.update({number: self._part_digest(number) for number in numbers})

    def _part_digest(self, number: int) -> bytes:
        array = self.arrays[number]
        known = self.away.get(number)
        return known or part_digest(array.nbytes, signature(as_bytes(array), threads=self.threads))

    def leaves(self) -> dict[str, AnyArray]:
        """Values by name, as views: float32 with their shape, everything else as bytes."""
        found = {}
        for part, slots, array in zip(self.parts, self._slots, self.arrays, strict=True):
            for slot in slots:
                leaf = slot.leaf
                size = leaf.count if part.is_floats else leaf.nbytes
                line = array[slot.start : slot.start + size]
                if not part.is_floats and leaf.dtype == "float32":
                    # Where the leaf does not begin at a multiple of four, NumPy still reads it right.
                    line = np.frombuffer(line.data, np.float32) if size else np.empty(0, np.float32)
                found[leaf.name] = line.reshape(leaf.shape) if leaf.dtype == "float32" else line
        return found


def _split(parts: Sequence[CodedPart], wanted: Sequence[Sequence[CodedSlot]], state: State) -> list[list[AnyArray]]:
    """Values of the wanted slots of each part; the other leaves may be missing."""
    names = {slot.leaf.name for part in parts for slot in part.slots}
    needed = {slot.leaf.name for slots in wanted for slot in slots}
    if different := sorted((needed - set(state)) | (set(state) - names)):
        raise StateError(f"the state has other leaves: {different[0]!r}; begin a new base", leaf=different[0])
    return [
        [flat(slot.leaf, state[slot.leaf.name], is_floats=part.is_floats) for slot in slots]
        for part, slots in zip(parts, wanted, strict=True)
    ]
