"""Where each leaf lies in a slot: the layout that stays the same from snapshot to snapshot.

Owns:    the images of the live and the frozen file, and the description the agent gets once.
Holds:   two states with the same signature share a plan, so a snapshot costs no layout work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stepwell.arena.memory import FROZEN, Arena
from stepwell.format.record import LeafEntry
from stepwell.format.shard import LeafSpec, ShardLayout, lay_out
from stepwell.state.flatten import Leaf, dtype_from
from stepwell.state.roles import Role

Signature = tuple[tuple[str, str, tuple[int, ...], str, bool], ...]


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

    @property
    def frozen_bytes(self) -> int:
        """Size of the frozen file."""
        return 0 if self.frozen is None else self.frozen.nbytes

    def views(self, arena: Arena, slot: int) -> dict[str, torch.Tensor]:
        """Tensors over the bytes of a slot (and of the frozen image), one per leaf."""
        found = {}
        for entry in self.entries:
            place, dtype = self.places[entry.name], dtype_from(entry.dtype)
            start = arena.shape.start(FROZEN if place.is_frozen else slot) + place.start
            if place.nbytes:
                flat = torch.frombuffer(arena.memory, dtype=torch.uint8, count=place.nbytes, offset=start)
                found[entry.name] = flat.view(dtype).view(entry.shape)
            else:
                found[entry.name] = torch.empty(entry.shape, dtype=dtype)
        return found

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
        (leaf.name, leaf.dtype, tuple(leaf.tensor.shape), str(leaf.tensor.device), role.protection == "frozen")
        for leaf, role in zip(leaves, roles, strict=True)
    )


def make_plan(number: int, leaves: Sequence[Leaf], roles: Sequence[Role]) -> Plan:
    """Lay the leaves out."""
    specs = [LeafSpec(leaf.name, leaf.dtype, tuple(leaf.tensor.shape)) for leaf in leaves]
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
                global_shape=shape,
                offsets=(0,) * len(shape),
            )
        )
    return Plan(number, signature(leaves, roles), live, frozen, places, tuple(entries))
