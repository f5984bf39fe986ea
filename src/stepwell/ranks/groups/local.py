"""A run of one process.

Owns:    nothing: every call answers at once.
"""

from __future__ import annotations

from stepwell.ranks.groups.group import Group


class LocalGroup(Group):
    """The group of a process that is alone."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        return [data]
