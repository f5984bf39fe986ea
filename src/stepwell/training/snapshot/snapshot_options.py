"""What the user chose for the snapshots of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.storage.codecs.assignment import Deltas


@dataclass(frozen=True)
class SnapshotOptions:
    """How snapshots are taken.

    verify:       compare hashes of the copy with the live state
    host_memory:  upper limit of all slots, in bytes
    slots:        how many snapshots the arena holds
    """

    strategy: str
    verify: bool
    host_memory: int | None
    slots: int
    deltas: Deltas | None = None
