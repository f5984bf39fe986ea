"""Who is connected to whom on the line: two levels, so that no rank has as many connections as there are ranks.

Owns:    the shape: the ranks of a node below its first one, the first ones of all nodes below rank 0.
Holds:   pure. With one node, and with one rank on each, it is a star around rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence


class Tree:
    """As one rank sees it. `parent` is None on rank 0.

    children:  the ranks that call this one
    """

    def __init__(self, rank: int, node_of: Sequence[int]) -> None:
        above = parents(node_of)
        self.rank = rank
        self.parent = None if rank == 0 else above[rank]
        self.children = frozenset(other for other, parent in enumerate(above) if parent == rank != other)
        self._behind: dict[int, set[int]] = {}
        self._way: dict[int, int] = {}
        for other, parent in enumerate(above if rank == 0 else ()):  # the others need to know no more than that
            if parent != 0:
                self._way[other] = parent
                self._behind.setdefault(parent, {parent}).add(other)

    def behind(self, child: int) -> set[int]:
        """The ranks that `child` speaks for: itself, and on rank 0 the other ranks of its node."""
        return self._behind.get(child, {child})

    def way_to(self, rank: int) -> int | None:
        """Which child leads to that rank, which may be further down; None: it is not below this one."""
        return rank if rank in self.children else self._way.get(rank)


def parents(node_of: Sequence[int]) -> list[int]:
    """Whom each rank is connected to, further up; rank 0 to itself."""
    first: dict[int, int] = {}
    heads = [first.setdefault(node, rank) for rank, node in enumerate(node_of)]
    return [0 if head == rank else head for rank, head in enumerate(heads)]
