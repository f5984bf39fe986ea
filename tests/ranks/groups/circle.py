"""A group of threads, for tests of what stands on groups."""

from __future__ import annotations

import threading

from stepwell.ranks.groups.group import Absent, Group


class Circle:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots = [b""] * size
        self.barrier = threading.Barrier(size)

    def rank(self, rank: int) -> Group:
        return _Member(self, rank)


class _Member(Group):
    def __init__(self, circle: Circle, rank: int) -> None:
        super().__init__(rank, circle.size)
        self._circle = circle

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        self._circle.slots[self.rank] = data
        try:
            self._circle.barrier.wait(seconds)
            answers = list(self._circle.slots)
            self._circle.barrier.wait(seconds)
        except threading.BrokenBarrierError:
            raise Absent([], seconds) from None
        return answers
