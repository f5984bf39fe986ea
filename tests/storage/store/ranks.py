"""All ranks of a job as far as their storage sees them: real persisters, one after the other, in this process."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.restore.whole import Whole, parts_on_disk
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.storage.store import assemble, catalog, files
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner
from tests.requests import request
from tests.storage.store.growing import counted

ROW_BYTES, START = 16, 4096
LONG_AGO = 2.0
"""Since a rank that waits for the leader has written its part: all that it looks at, it looks at now."""


class Job:
    """So many ranks, each with its rows of so many leaves; of the shards there is only the length."""

    def __init__(self, where: Path | ObjectPath, log: Path, ranks: int, leaves: int = 3) -> None:
        self.paths, self.ranks, self.leaves, self.step = RunPaths(where), ranks, leaves, 0
        self.run = open_run(self.paths, seed=1).id
        files.make_directory(self.paths.lineages)
        self.lineage = create_next(self.paths, parent=0, step=0).number
        events = journal.EventLog(log, who="test")
        paths = [RunPaths(where, rank).remembering() for rank in range(ranks)]
        self.persisters = [Persister(one, events, lineage=self.lineage) for one in paths]

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, 0, self.lineage)

    def record(self, rank: int) -> Record:
        nbytes = START + self.leaves * ROW_BYTES
        file = FileEntry(
            f"rank-{rank:05d}.safetensors", "safetensors", nbytes, START, ("0" * 16,) * -(-nbytes // START)
        )
        entries = []
        for number in range(self.leaves):
            start = START + number * ROW_BYTES
            whole = {"global_shape": (self.ranks, 4), "offsets": (rank, 0), "role": "parameter", "device": "cpu"}
            entries.append(LeafEntry(f"model/{number}", 0, "float32", (1, 4), start, start + ROW_BYTES, **whole))
        owner = Owner(rank, self.ranks)
        return Record(self.run, self.id, owner, 1.0, (file,), tuple(entries), {}, elsewhere=())

    def _pending(self, rank: int) -> Any:
        made = {
            "id": self.id,
            "owner": Owner(rank, self.ranks),
            "request": request(self.step),
            "run": self.run,
            "failures": 0,
        }
        return SimpleNamespace(**made, record=self.record(rank), written_at=time.monotonic() - LONG_AGO)

    def write(self, rank: int) -> Counter[str]:
        """A rank's part: directory, shard, record. What it asks for, without the bytes of the shard."""
        persister, pending = self.persisters[rank], self._pending(rank)
        with counted(self.paths.root) as before:
            persister.open(pending)
        shard = self.paths.checkpoint(self.id) / f"rank-{rank:05d}.safetensors"
        files.put(shard, bytes(pending.record.nbytes), point="test")
        with counted(self.paths.root) as after:
            assert not persister.settle(pending, pending.record, 0.0)
        return before + after

    def look(self, rank: int) -> bool:
        """A rank looks what became of it."""
        return self.persisters[rank].follow(self._pending(rank))

    def commit(self) -> None:
        """One more checkpoint, of which nothing is counted."""
        self.step += 1
        for rank in range(self.ranks):
            self.write(rank)
        assert self.look(0)

    def cost(self) -> dict[str, Counter[str]]:
        """What one more commit asks of the storage, by who asks."""
        for _ in range(9):  # an agent looks at first what one before it may have left
            self.commit()
        self.step += 1
        found = {}
        for rank in range(self.ranks):
            found[f"rank {rank} writes"] = self.write(rank)
        with counted(self.paths.root) as found["rank 1 looks too early"]:
            assert not self.look(1)
        with counted(self.paths.root) as found["rank 0 commits"]:
            assert self.look(0)
        with counted(self.paths.root) as found["rank 1 looks"]:
            assert self.look(1)
        return found

    def restart(self, rank: int) -> Counter[str]:
        """What a rank asks for to know where its own rows lie."""
        with counted(self.paths.root) as found:
            manifest = catalog.read_manifest(self.paths, self.id)
            whole = Whole(parts_on_disk(self.paths, manifest), rank, is_lazy=True)
            wanted = {name: entry.box for name, entry in whole.leaves.items()}
            assert len(wanted) == self.leaves and not whole.lacking(wanted)
        return found


def read_bytes(job: Job, rank: int) -> int:
    """The metadata that a rank reads when it comes back."""
    directory = job.paths.checkpoint(job.id)
    return sum(len(files.get(directory / name)) for name in ("manifest.json", record_name(Owner(rank))))


def missing(job: Job) -> list[Any]:
    """What the leader waits for."""
    return list(assemble.gather(job.paths, job.id, job.ranks))
