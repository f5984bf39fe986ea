"""Names in a run directory.

run.json                      identity and seed
events.jsonl                  what happened
progress                      how far the trainer got, and who it is
storage.json                  how the file system is written best
history.json                  how often the run failed, and what checkpoints cost
lineage/0001.json             histories
step-000000001200.l0003/      one checkpoint
    rank-00000.safetensors            live leaves
    rank-00000.frozen.safetensors     leaves that do not change (a hard link to the older checkpoint's file)
    rank-00000.json                   shard record
    manifest.json                     the commit record
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stepwell.types import CheckpointId


@dataclass(frozen=True)
class RunPaths:
    """Where everything of a run lies."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def progress(self) -> Path:
        return self.root / "progress"

    @property
    def storage(self) -> Path:
        return self.root / "storage.json"

    @property
    def history(self) -> Path:
        return self.root / "history.json"

    @property
    def lineages(self) -> Path:
        return self.root / "lineage"

    def lineage(self, number: int) -> Path:
        return self.lineages / f"{number:04d}.json"

    def checkpoint(self, id: CheckpointId) -> Path:
        return self.root / id.directory

    def manifest(self, id: CheckpointId) -> Path:
        return self.checkpoint(id) / "manifest.json"
