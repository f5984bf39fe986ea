"""This rank's part of a checkpoint in the shared place, while its node cannot hold it.

Owns:    writing it there, what is said about it, and removing it when newer checkpoints are whole.
Not:     when (keeper), the manifest (flush): without one it is no checkpoint of the shared place.
Holds:   the same files, record and order as on a node, so carrying the checkpoint on finds this part there. Alone, all
         of a checkpoint is one part: then it is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stepwell.agent.pending import Pending
from stepwell.agent.target.shared_target import Persister
from stepwell.errors import StepwellError
from stepwell.events.journal import EventLog
from stepwell.levels.cached import Level
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, files
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner


def describe(record: Record, data: bytes) -> dict[str, Any]:
    """What other ranks are told of a part, `data` being the bytes of its record."""
    held = {"digest": document_digest(data), "nbytes": len(data), "data_bytes": record.nbytes}
    return held | {"suspect": record.suspect, "copies": record.copies}


class Spill(Persister):
    """Of one rank. Constructing only assigns."""

    def __init__(
        self, paths: RunPaths, owner: Owner, keep: Keep, log: EventLog, *, lineage: int, patience: float
    ) -> None:
        super().__init__(paths, log, lineage=lineage, patience=patience)
        self.owner, self._keep, self._lineage = owner, keep, lineage
        self._has_committed = False
        self.held: dict[CheckpointId, dict[str, Any]] = {}
        """What is said about the parts that lie there."""
        self.on_committed: Callable[[CheckpointId], None] = lambda id: None

    def open(self, pending: Pending) -> Location:
        """See `Persister`. Rank 0 may have nothing there: the directory's name has to be durable without it."""
        directory = super().open(pending)
        files.sync_directory(self.paths.root)
        return directory

    def persist(self, pending: Pending) -> bool:
        """See `Persister`."""
        is_committed = super().persist(pending)
        if not is_committed and pending.record is not None:
            self._note(pending.record)
        return is_committed

    def settle(self, pending: Pending, record: Record, started: float) -> bool:
        """See `Persister`."""
        is_committed = super().settle(pending, record, started)
        if is_committed:
            self._has_committed = True
            self.on_committed(pending.id)
        elif pending.record is not None:
            self._note(pending.record)
        return is_committed

    def prune_committed(self) -> None:
        """Apply the retention of the shared place, if something was committed there since the last time."""
        if self._has_committed:
            self._has_committed = not self.prune(self._lineage, self._keep)

    def recall(self, id: CheckpointId) -> None:
        """What an agent before this one left there. Raises OSError or DamagedError."""
        record = assemble.find_record(self.paths, id, self.owner)
        if record is not None:
            self._note(record)

    def _note(self, record: Record) -> None:
        data = files.get(self.paths.checkpoint(record.id) / record_name(self.owner))
        self.held[record.id] = describe(record, data) | {"is_shared": True}

    def withdraw(self, id: CheckpointId) -> None:
        """This part is needed no more. Raises OSError."""
        if self.held.pop(id, None) is None:
            return
        if files.exists(self.paths.manifest(id)):
            return  # it was carried on
        directory = self.paths.checkpoint(id)
        for name in files.list_names(directory):
            if name.startswith(f"{self.owner.stem}.") and not name.endswith(".void"):
                files.remove(directory / name)
        with contextlib.suppress(OSError):  # parts of other ranks
            files.remove_directory(directory)

    def withdraw_older(self, oldest: CheckpointId, level_of: Callable[[CheckpointId], Level | None]) -> None:
        """All parts of older checkpoints, but of those that are still to be carried on. Never raises: the sweep of the
        shared place is the next chance.
        """
        for id in sorted(id for id in self.held if id < oldest):
            with contextlib.suppress(OSError, StepwellError):
                level = level_of(id)
                if level is None or not level.flush or self._is_over(id):
                    self.withdraw(id)

    def _is_over(self, id: CheckpointId) -> bool:
        """Whether it was carried on, or never will be."""
        return files.exists(self.paths.manifest(id)) or assemble.is_ended(self.paths, id)
