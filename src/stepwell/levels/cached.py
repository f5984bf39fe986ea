"""What a node's cache holds of a run, found by content.

    node.json                      who this node is
    runs/<run id>/
        step-000000001200.l0003/
            rank-00003.safetensors ...   shards: the node's own, and copies of other nodes', under the same names
            rank-00003.json              the record: written last, so what has one is there
            manifest.json                all ranks hold it: copied from rank 0's node to every other one
            level.json                   what rank 0 decided about it: degraded, to be carried to the shared place
            rank-00003.flushed           that rank has carried its part to the shared place
            rank-00003.void, void.json   as in the run's own directory

Owns:    these names, listing and judging them without reading shards.
Holds:   owner and kind come from the files, never from who asks; other runs are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.format.record import Record
from stepwell.storage.store import files
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

LEVEL: Final = "stepwell.level/1"
_MAX_LEVEL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Held:
    """One rank's shard on one node: its record, and whether all of its files are there in full length."""

    rank: int
    world_size: int
    digest: str
    nbytes: int
    suspect: str | None
    is_whole: bool
    copies: dict[str, str] = field(default_factory=dict)
    """As in its record."""


@dataclass(frozen=True)
class Level:
    """What rank 0 decided about a whole checkpoint.

    degraded:  ranks whose redundancy could not be made, and why
    since:     how many, with this one, were not carried to the shared place since one was
    """

    flush: bool
    degraded: dict[str, str] = field(default_factory=dict)
    since: int = 0

    @property
    def why_degraded(self) -> str | None:
        """A sentence; None if it is protected."""
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in self.degraded.items()) or None

    def dump(self) -> bytes:
        """Bytes of `level.json`."""
        return seal({"format": LEVEL, "flush": self.flush, "degraded": self.degraded, "since": self.since})

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Level:
        """Parse and check it."""
        fields = Fields(unseal(data, path=path, kind=LEVEL), path=path)
        degraded = fields.raw("degraded")
        if not isinstance(degraded, dict):
            raise DamagedError(f"{path}: degraded is not of its form", path=path)
        reasons = {str(rank): str(reason) for rank, reason in degraded.items()}
        return cls(fields.flag("flush"), reasons, fields.integer("since"))


def read_level(paths: RunPaths, id: CheckpointId) -> Level | None:
    """What was decided about a checkpoint; None if nothing was, or it cannot be read."""
    path = paths.checkpoint(id) / "level.json"
    if not files.exists(path):
        return None
    with contextlib.suppress(DamagedError):
        return Level.load(files.get(path, limit=_MAX_LEVEL_BYTES), path=str(path))
    return None


def is_flushed(paths: RunPaths, id: CheckpointId, ranks: Iterable[int]) -> bool:
    """Whether these ranks have carried their parts to the shared place, or given up to."""
    names = files.list_names(paths.checkpoint(id))
    return all(f"{Owner(rank).stem}.flushed" in names for rank in ranks)


def mark_flushed(paths: RunPaths, id: CheckpointId, owner: Owner) -> None:
    """This rank's part is in the shared place, or never will be."""
    if files.is_directory(paths.checkpoint(id)):
        files.put(paths.checkpoint(id) / f"{owner.stem}.flushed", b"", point="flushed")


def steps(paths: RunPaths) -> list[CheckpointId]:
    """The checkpoints of which something lies in this cache, the newest first."""
    found = [CheckpointId.parse(name) for name in files.list_names(paths.root)]
    return sorted((id for id in found if id is not None), reverse=True)


def readable_steps(paths: RunPaths) -> list[CheckpointId]:
    """The same; none where the disk cannot even be read: what lies there is of no use."""
    with contextlib.suppress(OSError, DamagedError):
        return steps(paths)
    return []


def held(paths: RunPaths, id: CheckpointId, run: str) -> list[Held]:
    """Whose shards of one checkpoint are here. A record that cannot be read holds nothing."""
    directory = paths.checkpoint(id)
    sizes = {name: facts.nbytes for name, facts in files.list_facts(directory).items()}
    out = []
    for name in sizes:
        if name.startswith("rank-") and name.endswith(".json"):
            with contextlib.suppress(DamagedError, FileNotFoundError):
                data = files.get(directory / name)
                record = Record.load(data, path=str(directory / name))
                if record.id == id and record.run == run and record_name(record.owner) == name:
                    is_whole = all(sizes.get(file.name) == file.nbytes for file in record.files)
                    owner = record.owner
                    facts = owner.rank, owner.world_size, document_digest(data), len(data), record.suspect, is_whole
                    out.append(Held(*facts, record.copies))
    return sorted(out, key=lambda item: item.rank)


def dump_held(items: Iterable[Held]) -> list[list[Any]]:
    """As they travel."""
    return [list(vars(item).values()) for item in items]


def load_held(values: Iterable[Sequence[Any]]) -> list[Held]:
    """What `dump_held` gave."""
    return [Held(*item) for item in values]


def describe(paths: RunPaths, id: CheckpointId, run: str) -> dict[str, Any]:
    """Whose shards of a checkpoint this node holds, and what was decided about it, as it is told to another node."""
    manifest, level = paths.manifest(id), read_level(paths, id)
    decision = None
    if level is not None and files.exists(manifest):
        decision = [files.get(manifest).decode(), level.dump().decode()]
    return {"shards": dump_held(held(paths, id, run)), "decision": decision}


def owner_files(paths: RunPaths, id: CheckpointId, owner: Owner) -> list[str]:
    """Names of what belongs to one rank in a checkpoint's directory."""
    return [name for name in files.list_names(paths.checkpoint(id)) if name.startswith(f"{owner.stem}.")]
