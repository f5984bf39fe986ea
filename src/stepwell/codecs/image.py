"""The reader's state of a whole chain: one array for each part, what records are applied to and digests are taken of.

Holds:   the digest covers every byte of the state; two images of one layout with equal digests hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from stepwell.codecs.floats import AnyArray
from stepwell.codecs.layout import Part, State, as_bytes, flat
from stepwell.errors import StateError

DIGEST_NBYTES = 16


class Image:
    """State of all parts. Constructing makes room for it, filled with zeros."""

    def __init__(self, parts: Sequence[Part], arrays: list[AnyArray] | None = None) -> None:
        self.parts = tuple(parts)
        kinds = [np.float32 if part.is_floats else np.uint8 for part in self.parts]
        self.arrays: list[AnyArray] = arrays or [
            np.zeros(part.size, kind) for part, kind in zip(self.parts, kinds, strict=True)
        ]

    def copy(self) -> Image:
        """Another one with the same content."""
        return Image(self.parts, [array.copy() for array in self.arrays])

    def split(self, state: State) -> list[list[AnyArray]]:
        """Values of a state by part and leaf, in one dimension each. Raises StateError if they are not those leaves."""
        names = {slot.leaf.name for part in self.parts for slot in part.slots}
        if names != set(state):
            different = sorted(names ^ set(state))
            raise StateError(f"the state has other leaves: {different[0]!r}; begin a new base", leaf=different[0])
        return [
            [flat(slot.leaf, state[slot.leaf.name], is_floats=part.is_floats) for slot in part.slots]
            for part in self.parts
        ]

    def fill(self, values: Sequence[Sequence[AnyArray]]) -> None:
        """Take over values as they are."""
        for part, array, pieces in zip(self.parts, self.arrays, values, strict=True):
            for slot, piece in zip(part.slots, pieces, strict=True):
                array[slot.start : slot.start + piece.size] = piece

    def digest(self) -> bytes:
        """xxh3-128 over those of the parts."""
        whole = xxhash.xxh3_128()
        for array in self.arrays:
            whole.update(xxhash.xxh3_128_digest(as_bytes(array).data))
        return whole.digest()

    def leaves(self) -> dict[str, AnyArray]:
        """Values by name, as views: float32 with their shape, everything else as bytes."""
        found = {}
        for part, array in zip(self.parts, self.arrays, strict=True):
            for slot in part.slots:
                leaf = slot.leaf
                size = leaf.count if part.is_floats else leaf.nbytes
                line = array[slot.start : slot.start + size]
                if not part.is_floats and leaf.dtype == "float32":
                    # Where the leaf does not begin at a multiple of four, NumPy still reads it right.
                    line = np.frombuffer(line.data, np.float32) if size else np.empty(0, np.float32)
                found[leaf.name] = line.reshape(leaf.shape) if leaf.dtype == "float32" else line
        return found
