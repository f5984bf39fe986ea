"""Where each leaf lies in a slot: the layout that stays the same from snapshot to snapshot.

Owns:    the images of the live and the frozen file, and the description the agent gets once.
Holds:   two states with the same signature share a plan, so a snapshot costs no layout work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from stepwell.handover.memory import FROZEN, PAGE, Arena
from stepwell.handover.message import Encoded
from stepwell.handover.protocol import NewLayout
from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import LeafEntry, absent_fields, absent_leaf, leaf_fields
from stepwell.storage.format.shard import LeafSpec, ShardLayout, lay_out
from stepwell.training.state.flatten import Leaf
from stepwell.training.state.roles import Role
from stepwell.training.state.strides import strides_of

_OPTIMIZER_ROLES = ("moment1", "moment2", "optimizer")
Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class LeafPlace:
    """Where one leaf's bytes go. `index` is its number in the record."""

    index: int
    is_frozen: bool
    start: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A layout with a number. `frozen` is None when nothing is frozen.

    elsewhere, partners:  as in a record; None where there are no other ranks
    """

    number: int
    signature: Signature
    live: ShardLayout
    frozen: ShardLayout | None
    places: dict[str, LeafPlace]
    entries: tuple[LeafEntry, ...]
    checked: frozenset[str]
    elsewhere: tuple[LeafEntry, ...] = ()
    partners: tuple[int, ...] | None = None

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

    @cached_property
    def leaves_text(self) -> str:
        """All entries as JSON, as they stand in a record."""
        return json.dumps([leaf_fields(entry) for entry in self.entries], separators=(",", ":"))

    def message(self, *, is_partial: bool = False) -> NewLayout:
        """What the agent has to know."""
        return NewLayout(
            self.number,
            self.live.nbytes,
            self.frozen_bytes,
            leaves=Encoded(self.leaves_text),
            versions={"torch": torch.__version__},
            elsewhere=None if self.partners is None else tuple(absent_fields(entry) for entry in self.elsewhere),
            partners=self.partners,
            is_partial=is_partial,
        )


def signature(leaves: Sequence[Leaf], roles: Sequence[Role]) -> Signature:
    """What must stay the same for a plan to be used again."""
    return tuple(
        (
            leaf.name,
            leaf.dtype,
            tuple(leaf.tensor.shape),
            leaf.tensor.device,
            role.protection == "frozen",
            leaf.box,
            leaf.is_private,
            leaf.local.stride(),
        )
        for leaf, role in zip(leaves, roles, strict=True)
    )


def absent(leaves: Sequence[Leaf]) -> tuple[LeafEntry, ...]:
    """Leaves of which this rank stores nothing, as whole tensors."""
    return tuple(map(_absent_leaf, leaves))


def _absent_leaf(leaf: Leaf) -> LeafEntry:
    shape = tuple(leaf.local.shape) if leaf.global_shape is None else leaf.global_shape
    return absent_leaf(leaf.name, leaf.dtype, shape, str(leaf.local.device), strides_of(leaf))


def make_plan(
    number: int,
    leaves: Sequence[Leaf],
    roles: Sequence[Role],
    *,
    is_partial: bool = False,
    elsewhere: tuple[LeafEntry, ...] = (),
    partners: tuple[int, ...] | None = None,
    known: Signature | None = None,
) -> Plan:
    """Lay the leaves out: what is copied in place first, then what is gathered before it is copied.

    is_partial:  there are more leaves, which go another way
    known:       the signature, where it is known
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
        places[leaf.name] = LeafPlace(index, is_frozen[leaf.name], placed.start, placed.end - placed.start)
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
                strides=strides_of(leaf),
            )
        )
    checked = _checked(entries, is_partial)
    found = signature(leaves, roles) if known is None else known
    return Plan(number, found, live, frozen, places, tuple(entries), checked, elsewhere, partners)


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
