"""What this rank holds for others: copies, or parity, of each checkpoint on the node level.

Owns:    doing it, how often that is tried, and what is said about it.
Not:     who holds what for whom (levels.duties), when a checkpoint is whole (keeper).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from stepwell.errors import StepwellError
from stepwell.events.journal import EventLog
from stepwell.events.level_events import Protected
from stepwell.levels.assignments import Orders
from stepwell.levels.peers.connections import Peers
from stepwell.levels.protect.protection import Duties
from stepwell.levels.spilled_parts import SharedReader
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_TRIES: Final = 3
"""How often a duty is tried before the checkpoint is called degraded."""


class Redundancy:
    """Of one rank. Constructing only assigns."""

    def __init__(
        self, orders: Orders, rank: int, paths: RunPaths, shared: RunPaths, peers: Peers, log: EventLog
    ) -> None:
        self._shared = SharedReader(shared)
        self.duties = Duties.of(orders.protect, [seat.domain for seat in orders.peers], rank)
        self._run, self._paths, self._peers, self._log = orders.run, paths, peers, log
        self._tries: dict[CheckpointId, int] = {}
        self._failed: dict[CheckpointId, str] = {}
        self._done: set[CheckpointId] = set()

    def protect(self, id: CheckpointId) -> None:
        """Hold what other ranks need held here, once they have their parts. A failure counts, and is told."""
        if self.is_over(id):
            return
        started = time.monotonic()
        try:
            nbytes = self.duties.do(self._paths, id, self._run, self._peers, self._shared)
        except (OSError, StepwellError) as error:
            self._tries[id] = self._tries.get(id, 0) + 1
            if self._tries[id] >= _TRIES:
                self._failed[id] = f"{type(error).__name__}: {error}"
            return
        if nbytes is not None:
            self._done.add(id)
            if nbytes:
                self._log.emit(Protected(step=id.step, nbytes=nbytes, seconds=time.monotonic() - started))

    def is_done(self, id: CheckpointId) -> bool:
        """Whether this process did it."""
        return id in self._done

    def is_held(self, id: CheckpointId) -> bool:
        """Whether it is here, whoever did it."""
        return self.is_done(id) or self.duties.is_done(self._paths, id)

    def is_over(self, id: CheckpointId) -> bool:
        """Whether it is done, or given up."""
        return self.is_done(id) or id in self._failed

    def why_failed(self, id: CheckpointId) -> str | None:
        """Why it was given up."""
        return self._failed.get(id)

    def keep_only(self, ids: Collection[CheckpointId]) -> None:
        """What is not there any more needs no memory."""
        self._done &= set(ids)
        self._tries = {id: tries for id, tries in self._tries.items() if id in ids}
        self._failed = {id: why for id, why in self._failed.items() if id in ids}
