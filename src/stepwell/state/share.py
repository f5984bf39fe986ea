"""What this rank stores of the state it holds.

Owns:    cutting leaves to the rows that are this rank's, and what it says of its leaves so that the ranks can share.
Not:     the verdict (ranks.sharing).
Holds:   a cut is a view: nothing is copied. What is cut once for leaves that stay is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from stepwell.format.box import Box
from stepwell.state.distributed import mesh_of
from stepwell.state.flatten import Copy, Flat, Leaf

OWN = "stepwell"
"""Where the run's own part of the tree is: its generators are each rank's own, and never claimed."""


def held_box(leaf: Leaf) -> tuple[tuple[int, ...], Box]:
    """Shape of the whole tensor, and the box of it that this process holds."""
    if leaf.global_shape is None or leaf.box is None:
        shape = tuple(leaf.local.shape)
        return shape, Box.whole(shape)
    return leaf.global_shape, leaf.box


@dataclass(frozen=True)
class Kept:
    """Cut leaves that stay, made from those of `fixed`."""

    fixed: object
    leaves: list[Leaf]
    copies: list[Copy]


class Cutter:
    """Cuts states by one verdict: `rows` of each leaf that is shared; the others are this rank's own."""

    def __init__(self, rows: Mapping[str, tuple[int, int, str]]) -> None:
        self._rows = rows
        self._kept: Kept | None = None

    def cut(self, flat: Flat) -> Flat:
        """What this rank stores of a state."""
        if flat.fixed is None:
            return Flat(flat.tree, self._leaves(flat.leaves), copies=self._copies(flat.leaves))
        if self._kept is None or self._kept.fixed is not flat.fixed:
            fixed = flat.leaves[: flat.fixed_count]
            self._kept = Kept(flat.fixed, self._leaves(fixed), self._copies(fixed))
        kept, rest = self._kept, flat.leaves[flat.fixed_count :]
        leaves = kept.leaves + self._leaves(rest)
        return Flat(flat.tree, leaves, kept, len(kept.leaves), kept.copies, self._copies(rest))

    def _copies(self, leaves: list[Leaf]) -> list[Copy]:
        held = [(self._rows.get(leaf.name, (0, 0, ""))[2], leaf.name, leaf.local) for leaf in leaves]
        return [item for item in held if item[0] and item[2].numel()]

    def _leaves(self, leaves: list[Leaf]) -> list[Leaf]:
        cut = (self._leaf(leaf) for leaf in leaves)
        return [leaf for leaf in cut if leaf is not None]

    def _leaf(self, leaf: Leaf) -> Leaf | None:
        shape, box = held_box(leaf)
        if leaf.name not in self._rows:
            return replace(leaf, is_private=True)
        first, last, _ = self._rows[leaf.name]
        if first >= last:
            return None
        held = leaf.local
        tensor = held if last - first == box.row_count else held.narrow(0, first, last - first)
        return replace(leaf, tensor=tensor, held=held, global_shape=shape, box=box.rows(first, last))


def describe(leaf: Leaf, digest: Callable[[torch.Tensor], str]) -> tuple[str, tuple[int, ...], Box, str, str]:
    """What this rank says of a leaf: element type, whole shape, box, a digest, and whom it is sharded over."""
    shape, box = held_box(leaf)
    return leaf.dtype, shape, box, digest(leaf.local), "" if leaf.origin is None else mesh_of(leaf.origin)
