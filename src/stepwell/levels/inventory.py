"""Who holds what of which checkpoint, from what all nodes told. Pure; the same on all ranks.

Owns:    the verdict whether every part of a checkpoint can be had, and from where.
Holds:   holders are counted by node, found by what lies there; what a rank number was before does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.levels.cached import Held, dump_held, load_held
from stepwell.levels.protect.erasure import StripeLayout, survives
from stepwell.types import CheckpointId

Place = tuple[str, int, str]
"""Something on a node: `shard` or `parity`, of which rank, and the node."""


@dataclass(frozen=True)
class HeldParity:
    """Parity that a node holds: of which member, for whom, and the digest of each member's record."""

    rank: int
    members: tuple[int, ...]
    losses: int
    lengths: tuple[int, ...]
    digests: tuple[str, ...]
    nbytes: int
    """Of its document."""

    @property
    def set_of(self) -> tuple[Any, ...]:
        """The same for all members of one set of one checkpoint."""
        return self.members, self.losses, self.lengths, self.digests


@dataclass(frozen=True)
class HeldNode:
    """What a node holds of one checkpoint."""

    shards: list[Held] = field(default_factory=list)
    parity: list[HeldParity] = field(default_factory=list)

    def dump(self) -> list[Any]:
        """As it travels."""
        return [dump_held(self.shards), [list(vars(item).values()) for item in self.parity]]

    @classmethod
    def load(cls, values: Sequence[Any]) -> HeldNode:
        """What `dump` gave."""
        parity = [
            HeldParity(rank, tuple(members), losses, tuple(lengths), tuple(digests), nbytes)
            for rank, members, losses, lengths, digests, nbytes in values[1]
        ]
        return cls(load_held(values[0]), parity)


@dataclass(frozen=True)
class Loss:
    """A shard that lies nowhere, and the set that it can be made from.

    lost:  positions in the set of which the shard or the parity lies nowhere
    """

    rank: int
    parity: HeldParity
    lost: tuple[int, ...]


class Inventory:
    """Of one checkpoint: by node, whose shards and whose parity lie there."""

    def __init__(self, nodes: Mapping[str, HeldNode]) -> None:
        self.nodes = nodes

    def without(self, doubted: Collection[Place]) -> Inventory:
        """As if what was found damaged, or could not be had, were not there."""
        left = {
            name: HeldNode(
                [item for item in node.shards if ("shard", item.rank, name) not in doubted],
                [item for item in node.parity if ("parity", item.rank, name) not in doubted],
            )
            for name, node in self.nodes.items()
        }
        return Inventory(left)

    @property
    def shards(self) -> list[Held]:
        """All whole ones, on any node."""
        return [item for node in self.nodes.values() for item in node.shards if item.is_whole]

    @property
    def is_suspect(self) -> bool:
        return any(item.suspect is not None for item in self.shards)

    def holders(self, rank: int) -> dict[str, Held]:
        """The nodes that hold a rank's shard."""
        return self._holders.get(rank, {})

    @functools.cached_property
    def _holders(self) -> dict[int, dict[str, Held]]:
        found: dict[int, dict[str, Held]] = {}
        for name, node in sorted(self.nodes.items()):
            for item in node.shards:
                if item.is_whole:
                    found.setdefault(item.rank, {})[name] = item
        return found

    def parity_holders(self, parity: HeldParity, position: int) -> dict[str, HeldParity]:
        """The nodes that hold one member's parity of a set."""
        return {
            name: item
            for name, node in sorted(self.nodes.items())
            for item in node.parity
            if item.set_of == parity.set_of and item.rank == parity.members[position]
        }

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, if those that are here agree on that."""
        sizes = {item.world_size for item in self.shards}
        return sizes.pop() if len(sizes) == 1 else None

    def losses(self) -> list[Loss] | None:
        """Shards that have to be made from others; None if one cannot be had at all."""
        size = self.world_size
        missing = [rank for rank in range(size or 0) if not self.holders(rank)]
        found = [self._loss(rank) for rank in missing]
        out = [loss for loss in found if loss is not None]
        return out if size is not None and len(out) == len(missing) else None

    def _loss(self, rank: int) -> Loss | None:
        known: Iterable[HeldParity] = (item for node in self.nodes.values() for item in node.parity)
        for parity in {item.set_of: item for item in known if rank in item.members}.values():
            lost = [
                at
                for at, member in enumerate(parity.members)
                if not self._has(member, parity.digests[at]) or not self.parity_holders(parity, at)
            ]
            if survives(StripeLayout(parity.lengths, parity.losses), lost):
                return Loss(rank, parity, tuple(lost))
        return None

    def _has(self, rank: int, digest: str) -> bool:
        return any(item.digest == digest for item in self.holders(rank).values())


def gather(told: Sequence[tuple[str, Mapping[str, Sequence[Any]]]]) -> dict[CheckpointId, Inventory]:
    """What all ranks told of their nodes, by checkpoint. Ranks of one node tell the same."""
    found: dict[CheckpointId, dict[str, HeldNode]] = {}
    for name, steps in told:
        for directory, values in steps.items():
            id = CheckpointId.parse(directory)
            if id is not None:
                found.setdefault(id, {})[name] = HeldNode.load(values)
    return {id: Inventory(nodes) for id, nodes in found.items()}
