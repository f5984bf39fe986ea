"""Where each leaf lies in a slot: the layout that stays the same from snapshot to snapshot.

Owns:    the images of the live and the frozen file, and the description the agent gets once.
Holds:   two states with the same signature share a plan, so a snapshot costs no layout work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stepwell.arena.memory import FROZEN, PAGE, Arena
from stepwell.format import dtypes
from stepwell.format.box import Box
from stepwell.format.record import LeafEntry
from stepwell.format.shard import LeafSpec, ShardLayout, lay_out
from stepwell.state.flatten import Leaf
from stepwell.state.roles import Role

_OPTIMIZER_ROLES = ("moment1", "moment2", "optimizer")
Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Place:
    """Where one leaf's bytes go. `index` is its number in the record."""

    index: int
    is_frozen: bool
    start: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A layout with a number. `frozen` is None when nothing is frozen."""

    number: int
    signature: Signature
    live: ShardLayout
    frozen: ShardLayout | None
    places: dict[str, Place]
    entries: tuple[LeafEntry, ...]
    checked: frozenset[str]

    @property
    def frozen_bytes(self) -> int:
        """Size of the frozen file."""
        return 0 if self.frozen is None else self.frozen.nbytes

    def view(self, arena: Arena, slot: int, name: str) -> torch.Tensor:
        """A leaf's bytes in a slot (or in the frozen image)."""
        place = self.places[name]
        start = arena.shape.start(FROZEN if place.is_frozen else slot) + place.start
        if not place.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(arena.memory, dtype=torch.uint8, count=place.nbytes, offset=start)

    def message(self) -> dict[str, Any]:
        """What the agent has to know."""
        return {
            "id": self.number,
            "nbytes": self.live.nbytes,
            "frozen_bytes": self.frozen_bytes,
            "leaves": [asdict(entry) for entry in self.entries],
            "versions": {"torch": torch.__version__},
        }


def signature(leaves: Sequence[Leaf], roles: Sequence[Role]) -> Signature:
    """What must stay the same for a plan to be used again."""
    return tuple(
        (
            leaf.name,
            leaf.dtype,
            tuple(leaf.tensor.shape),
            str(leaf.tensor.device),
            role.protection == "frozen",
            leaf.box,
            leaf.is_private,
        )
        for leaf, role in zip(leaves, roles, strict=True)
    )


def make_plan(number: int, leaves: Sequence[Leaf], roles: Sequence[Role], *, is_partial: bool = False) -> Plan:
    """Lay the leaves out: what is copied in place first, then what is gathered before it is copied.

    is_partial:  there are more leaves, which go another way
    """
    in_place = sorted(
        zip(leaves, roles, strict=True), key=lambda pair: pair[1].protection == "loose" or pair[0].tensor.nbytes < PAGE
    )
    specs = [LeafSpec(leaf.name, leaf.dtype, tuple(leaf.tensor.shape)) for leaf, _ in in_place]
    is_frozen = {leaf.name: role.protection == "frozen" for leaf, role in zip(leaves, roles, strict=True)}
    live = lay_out(spec for spec in specs if not is_frozen[spec.name])
    frozen = lay_out(spec for spec in specs if is_frozen[spec.name]) if any(is_frozen.values()) else None
    starts = {
        placed.spec.name: placed for layout in (live, frozen) if layout is not None for placed in layout.placements
    }
    places, entries = {}, []
    for index, (leaf, role) in enumerate(zip(leaves, roles, strict=True)):
        placed = starts[leaf.name]
        places[leaf.name] = Place(index, is_frozen[leaf.name], placed.start, placed.end - placed.start)
        shape = tuple(leaf.tensor.shape)
        box = Box.whole(shape) if leaf.box is None else leaf.box
        entries.append(
            LeafEntry(
                name=leaf.name,
                file=int(is_frozen[leaf.name]),
                dtype=leaf.dtype,
                shape=shape,
                start=placed.start,
                end=placed.end,
                role=role.meaning,
                device=str(leaf.tensor.device),
                global_shape=shape if leaf.global_shape is None else leaf.global_shape,
                offsets=box.offsets,
                private=leaf.is_private,
            )
        )
    return Plan(number, signature(leaves, roles), live, frozen, places, tuple(entries), _checked(entries, is_partial))


def _checked(entries: Sequence[LeafEntry], is_partial: bool) -> frozenset[str]:
    """Leaves in which a non-finite value makes the checkpoint suspect: what the optimizers made of the parameters.

    In torch's optimizers a non-finite moment makes its parameter non-finite in the same step. Where no parameter is
    tracked the optimizer's own values are all there is.
    """
    floating = [entry for entry in entries if entry.dtype in dtypes.FLOATING and not entry.file]
    parameters = [entry.name for entry in floating if entry.role == "parameter"]
    if parameters or is_partial:  # of a part the parameters may all be elsewhere
        return frozenset(parameters)
    return frozenset(entry.name for entry in floating if entry.role in _OPTIMIZER_ROLES)
