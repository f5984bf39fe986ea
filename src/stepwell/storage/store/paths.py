"""Names in a run directory.

run.json                      identity and seed
events.jsonl                  what happened
progress                      how far the trainer got, and who it is
storage.json                  how the file system is written best
nodes.json                    with levels: the newest checkpoint that was whole on the nodes
secret                        mode 0600: what the processes of the run know one another by
history.json                  how often the run failed, and what checkpoints cost
lineage/0001.json             histories
step-000000001200.l0003/      one checkpoint
    rank-00000.safetensors            live leaves
    rank-00000.frozen.safetensors     leaves that do not change (a hard link to the older checkpoint's file)
    rank-00000.json                   shard record
    rank-00003.void                   in the place of the record: why this rank has none
    manifest.json                     the commit record
    void.json                         in the place of the manifest: why there will be none
events.rank-00003.jsonl, progress.rank-00003: of the ranks above 0

In a bucket the names are the same. Files that are written again and again (events, progress, history) lie on the run's
desk, a directory of this machine; the agent copies them to the bucket now and then (`desk`).
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from stepwell.storage.store import no_follow
from stepwell.storage.store.known import Known
from stepwell.storage.store.objects import Location, ObjectPath, is_address
from stepwell.types import CheckpointId, Owner

_OF_RANK: Final = re.compile(r"progress\.rank-(\d{5,})|events\.rank-(\d{5,})\.jsonl", re.ASCII)


@dataclass(frozen=True)
class RunPaths:
    """Where everything of a run lies. `rank`: whose events and progress. `known`: what was read there once."""

    root: Location
    rank: int = 0
    known: Known | None = field(default=None, compare=False, repr=False)

    @classmethod
    def at(cls, where: str | os.PathLike[str], rank: int = 0) -> RunPaths:
        """The run in a directory, or in a bucket. Raises ConfigError for an address that means nothing."""
        text = os.fspath(where)
        if is_address(text):
            return cls(ObjectPath.parse(text), rank)
        path = Path(text)
        if no_follow.is_inside(path):  # the user's own link, to a run in a directory that is called like one of a run's
            path = Path(os.path.realpath(path))
        return cls(path, rank)

    def remembering(self) -> RunPaths:
        """The same, for a process that commits again and again: what never changes is read once."""
        return replace(self, known=Known())

    @property
    def identity(self) -> str:
        """The same for every process of this machine that means this very place. Raises OSError."""
        if isinstance(self.root, ObjectPath):
            return hashlib.blake2b(str(self.root).encode(), digest_size=8).hexdigest()
        facts = os.stat(self.root)
        return f"{facts.st_dev:x}.{facts.st_ino:x}"

    @property
    def desk(self) -> Path:
        """Where files lie that are written again and again."""
        if not isinstance(self.root, ObjectPath):
            return self.root
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return Path(os.environ.get("STEPWELL_DESK") or Path(state, "stepwell")).absolute() / self.identity

    @property
    def run(self) -> Location:
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        return self.desk / (f"events.{Owner(self.rank).stem}.jsonl" if self.rank else "events.jsonl")

    @property
    def progress(self) -> Path:
        return self.desk / (f"progress.{Owner(self.rank).stem}" if self.rank else "progress")

    def ranks(self) -> list[RunPaths]:
        """Of each rank that ever wrote progress or events here; of rank 0 in any case."""
        found = {0}
        for name in os.listdir(self.desk) if self.desk.is_dir() else ():
            match = _OF_RANK.fullmatch(name)
            if match is not None:
                found.add(int(match[1] or match[2]))
        return [RunPaths(self.root, rank) for rank in sorted(found)]

    @property
    def storage(self) -> Path:
        return self.desk / "storage.json"

    @property
    def history(self) -> Path:
        return self.desk / "history.json"

    @property
    def nodes(self) -> Location:
        return self.root / "nodes.json"

    @property
    def secret(self) -> Location:
        return self.root / "secret"

    @property
    def lineages(self) -> Location:
        return self.root / "lineage"

    def lineage(self, number: int) -> Location:
        return self.lineages / f"{number:04d}.json"

    def checkpoint(self, id: CheckpointId) -> Location:
        return self.root / id.directory

    def manifest(self, id: CheckpointId) -> Location:
        return self.checkpoint(id) / "manifest.json"

    def void(self, id: CheckpointId) -> Location:
        return self.checkpoint(id) / "void.json"
