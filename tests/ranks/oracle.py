"""The verdict as it was first written (commit d2686d0): leaf by leaf, and all of it in one place. For comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box

Rows = tuple[int, int, str]
"""Of the part of a leaf that a rank holds, the rows it stores, [first, last), and who holds the same part: `0,1,2`."""
Shares = dict[str, Rows]
"""What one rank stores of each leaf that belongs to all. A leaf that is not named is its own, and stored whole."""


@dataclass(frozen=True)
class Claim:
    """One leaf as one rank holds it: a box of a tensor of `global_shape`, and a digest of its content."""

    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    digest: str
    mesh: str = ""
    """Whom it was sharded over, as a digest."""
    is_still: bool = False
    """Nobody changes it: it is written once, and what is written each time is shared evenly without it."""

    @property
    def is_part(self) -> bool:
        """Less than the whole tensor: it was sharded on purpose, so the tensor belongs to all."""
        return self.box != Box.whole(self.global_shape)

    @property
    def row_bytes(self) -> int:
        return self.box.numel * dtypes.itemsize(self.dtype) // max(1, self.box.row_count)


def share(claims: Sequence[Mapping[str, Claim]]) -> list[Shares]:
    """The verdict for each rank."""
    shares: list[Shares] = [{} for _ in claims]
    together: dict[tuple[tuple[int, ...], bool], list[tuple[str, Claim]]] = {}
    for name in sorted({name for mine in claims for name in mine}):
        found = {rank: mine[name] for rank, mine in enumerate(claims) if name in mine}
        for ranks in _groups(found):
            is_equal = len({found[rank].digest for rank in ranks}) == 1
            storing = ranks if is_equal else ranks[:1]  # copies of a part that drifted apart: one of them counts
            for rank in ranks:
                shares[rank][name] = (0, 0, "")
            first = found[ranks[0]]
            together.setdefault((tuple(storing), first.is_still), []).append((name, first))
    for (holders, _), leaves in together.items():
        _split(holders, leaves, shares)
    return shares


def _groups(found: Mapping[int, Claim]) -> list[list[int]]:
    """Ranks that hold the same part of one tensor; no group for a leaf that is each rank's own."""
    claims = found.values()
    if len({(claim.dtype, claim.global_shape) for claim in claims}) > 1:
        return []
    if not any(claim.box.numel for claim in claims):
        return []  # nobody would store it, and a record has to
    groups: dict[Box, list[int]] = {}
    for rank, claim in found.items():
        groups.setdefault(claim.box, []).append(rank)
    is_equal = all(len({found[rank].digest for rank in ranks}) == 1 for ranks in groups.values())
    is_one = any(claim.is_part for claim in claims) and len({claim.mesh for claim in claims}) == 1
    # Of parts that differ one counts only if they were meant to be copies: over other ranks it is another tensor, as
    # the optimizer of another pipeline stage has it under the same number.
    return list(groups.values()) if is_equal or is_one else []


def _split(holders: tuple[int, ...], leaves: Sequence[tuple[str, Claim]], shares: Sequence[Shares]) -> None:
    """Give each holder its part of the bytes of all leaves, as they follow each other, cut between rows."""
    label = ",".join(map(str, holders)) if len(holders) > 1 else ""
    total = sum(claim.row_bytes * claim.box.row_count for _, claim in leaves)
    position = 0
    for name, claim in leaves:
        rows, row_bytes = claim.box.row_count, claim.row_bytes
        cuts = []
        for number in range(len(holders) + 1):
            into = total * number // len(holders) - position
            cuts.append(min(rows, max(0, -(-into // row_bytes))) if row_bytes else 0)
        cuts[0], cuts[-1] = 0, rows
        for rank, first, last in zip(holders, cuts, cuts[1:], strict=False):
            shares[rank][name] = (first, last, label)
        position += rows * row_bytes
