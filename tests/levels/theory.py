"""What redundancy can bring back, from who holds what: the theory that nodes and arithmetic are compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stepwell.levels.protect.sets import losses_allowed


def is_recoverable_from_copies(holders: Mapping[int, Collection[int]], lost: Collection[int]) -> bool:
    """Whether of every lost rank's shard there is a copy on a rank that is not lost."""
    gone = set(lost)
    return all(any(holder not in gone for holder in holders.get(rank, ())) for rank in gone)


def is_recoverable_from_parity(sets: Sequence[Sequence[int]], parity: int, lost: Collection[int]) -> bool:
    """Whether no set lost more members than it has parity for, and nobody is lost who is in no set."""
    gone = set(lost)
    protected = {rank for members in sets for rank in members}
    return gone <= protected and all(
        len(gone.intersection(members)) <= losses_allowed(len(members), parity) for members in sets
    )
