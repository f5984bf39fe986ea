"""What this rank stores of the state it holds.

Owns:    cutting leaves to the rows that are this rank's, and what it says of its leaves so that the ranks can share.
Not:     the verdict (ranks.sharing).
Holds:   a cut is a view: nothing is copied. What is cut once for leaves that stay is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.storage.format.box import Box
from stepwell.storage.format.checksum import block_digest
from stepwell.training.state.flatten import Copy, Flat, Leaf
from stepwell.training.state.shards import mesh_of
from stepwell.training.state.strides import strides_of

OWN = "stepwell"
"""Where the run's own part of the tree is: its generators are each rank's own, and never claimed."""


def held_box(leaf: Leaf) -> tuple[tuple[int, ...], Box]:
    """Shape of the whole tensor, and the box of it that this process holds."""
    if leaf.global_shape is None or leaf.box is None:
        shape = tuple(leaf.local.shape)
        return shape, Box.whole(shape)
    return leaf.global_shape, leaf.box


@dataclass(frozen=True)
class KeptRows:
    """Cut leaves that stay, made from those of `fixed`."""

    fixed: object
    leaves: list[Leaf]
    copies: list[Copy]
    elsewhere: list[Leaf]


class Cutter:
    """Cuts states by one verdict: `rows` of each leaf that is shared; the others are this rank's own.

    partners:  ranks that store the rest of what this rank holds
    """

    def __init__(self, rows: Mapping[str, tuple[int, int, str]], partners: Sequence[int] = ()) -> None:
        self._rows, self._partners = rows, tuple(partners)
        self._kept: KeptRows | None = None

    def cut(self, flat: Flat) -> Flat:
        """What this rank stores of a state."""
        if flat.fixed is None:
            leaves, elsewhere = self._leaves(flat.leaves)
            copies = self._copies(flat.leaves)
            return Flat(flat.tree, leaves, copies=copies, elsewhere=elsewhere, partners=self._partners)
        if self._kept is None or self._kept.fixed is not flat.fixed:
            fixed = flat.leaves[: flat.fixed_count]
            leaves, elsewhere = self._leaves(fixed)
            self._kept = KeptRows(flat.fixed, leaves, self._copies(fixed), elsewhere)
        kept, rest = self._kept, flat.leaves[flat.fixed_count :]
        leaves, elsewhere = self._leaves(rest)
        return Flat(
            flat.tree,
            kept.leaves + leaves,
            kept,
            len(kept.leaves),
            kept.copies,
            self._copies(rest),
            kept.elsewhere,
            elsewhere,
            self._partners,
        )

    def _copies(self, leaves: list[Leaf]) -> list[Copy]:
        held = [(self._rows.get(leaf.name, (0, 0, ""))[2], leaf.name, leaf.local) for leaf in leaves]
        return [item for item in held if item[0] and item[2].numel()]

    def _leaves(self, leaves: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """What this rank stores, and leaves of which it stores nothing."""
        cut = [(leaf, self._leaf(leaf)) for leaf in leaves]
        return [mine for _, mine in cut if mine is not None], [leaf for leaf, mine in cut if mine is None]

    def _leaf(self, leaf: Leaf) -> Leaf | None:
        shape, box = held_box(leaf)
        if leaf.name not in self._rows:
            return Leaf(leaf.name, leaf.path, leaf.tensor, leaf.held, leaf.global_shape, leaf.box, True, leaf.origin)
        first, last, _ = self._rows[leaf.name]
        if first >= last:
            return None
        held = leaf.local
        tensor = held if last - first == box.row_count else held.narrow(0, first, last - first)
        return Leaf(leaf.name, leaf.path, tensor, held, shape, box.rows(first, last), leaf.is_private, leaf.origin)


def describe(leaf: Leaf) -> tuple[str, tuple[int, ...], Box, str]:
    """What this rank says of a leaf: element type, whole shape, box, and whom it is sharded over."""
    shape, box = held_box(leaf)
    return leaf.dtype, shape, box, "" if leaf.origin is None else mesh_of(leaf.origin)


def content_of(leaf: Leaf, digest: str) -> bytes:
    """What it says of the content, in 8 bytes. How it lies in memory is part of it: what lies otherwise is no copy."""
    return bytes.fromhex(block_digest(f"{digest} {strides_of(leaf) or ''}".encode()))
