"""What checkpoints a run directory holds, and in which state each is.

Owns:    listing and judging by manifest and record, without reading shards.
Not:     choosing one (restore.preference), checking shard bytes (restore.verified_read).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.manifest import Manifest, Void
from stepwell.storage.format.record import Record
from stepwell.storage.store import files
from stepwell.storage.store.lineage import History, read_history
from stepwell.storage.store.objects import Location, ObjectFacts, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_MAX_MANIFEST_BYTES = 16 << 20
LOOKED_AT: Final = 2
"""Good checkpoints that retention never removes."""
_MAX_VOID_BYTES = 64 << 10
_MOST_SCANS: Final = 20


@dataclass(frozen=True)
class Entry:
    """One checkpoint directory. `manifest` is None when it is damaged (`damage` says how) or was never committed.

    `void`: what a rank said, so that it never will be.
    """

    id: CheckpointId
    path: Location
    manifest: Manifest | None
    damage: str | None
    is_live: bool
    why_not_live: str | None = None
    void: str | None = None

    @property
    def is_committed(self) -> bool:
        """A manifest is there, readable or not."""
        return self.manifest is not None or self.damage is not None

    @property
    def is_suspect(self) -> bool:
        """Its manifest says that the state may be wrong."""
        return self.manifest is not None and self.manifest.suspect is not None

    @property
    def is_good(self) -> bool:
        """Committed and, as far as the manifest tells, whole."""
        return self.manifest is not None


def scan(paths: RunPaths) -> list[Entry]:
    """All checkpoint directories, newest step first. Stray names are ignored.

    With `paths.known` the newest good ones, for which others may go, are looked at each time; of the others, what was
    read before holds.
    """
    history, known = read_history(paths), paths.known
    names = files.list_names(paths.root, follow=True)
    ids = sorted((id for id in map(CheckpointId.parse, names) if id is not None), reverse=True)
    entries: list[Entry] = []
    good = 0
    for id in ids:
        manifest = None if known is None or good < LOOKED_AT else known.manifest(id)
        if manifest is not None:
            entries.append(
                Entry(id, paths.checkpoint(id), manifest, None, history.is_live(id), history.why_not_live(id))
            )
        elif files.is_directory(paths.checkpoint(id)):
            entries.append(judge(paths, id, history))
            found = entries[-1]
            good += found.is_live and found.manifest is not None and found.manifest.suspect is None
    if known is not None:
        known.keep_only(set(ids))
    return entries


def scan_again(paths: RunPaths) -> list[Entry]:
    """As `scan`. A live run may remove all that was listed before it was looked at: then it is listed again."""
    entries: list[Entry] = []
    for _ in range(_MOST_SCANS):
        names, entries = files.list_names(paths.root, follow=True), scan(paths)
        if any(entry.is_committed for entry in entries) or names == files.list_names(paths.root, follow=True):
            break
    return entries


def judge(paths: RunPaths, id: CheckpointId, history: History) -> Entry:
    """Look at one checkpoint directory."""
    path, is_live, why_not = paths.checkpoint(id), history.is_live(id), history.why_not_live(id)
    if not files.exists(paths.manifest(id)):
        return Entry(id, path, None, None, is_live, why_not, _read_void(paths, id))
    try:
        return Entry(id, path, read_manifest(paths, id), None, is_live, why_not)
    except DamagedError as error:
        is_there = files.exists(paths.manifest(id))  # else whoever removes it was faster
        return Entry(id, path, None, str(error) if is_there else None, is_live, why_not)


def directory_facts(path: Location) -> ObjectFacts:
    """Size of the files in a directory, and when it changed last. Raises FileNotFoundError."""
    inside = files.list_facts(path).values()
    if isinstance(path, ObjectPath):
        if not inside:
            raise FileNotFoundError(f"{path}: nothing is there")
        changed = max(found.modified for found in inside)
    else:
        own = files.facts(path)
        if own is None:
            raise FileNotFoundError(f"{path}: nothing is there")
        changed = own.modified
    return ObjectFacts(sum(found.nbytes for found in inside), changed)


def _read_void(paths: RunPaths, id: CheckpointId) -> str | None:
    """Why a checkpoint of many ranks came to nothing: by the leader's word, or by that of a rank that gave up."""
    names = [name for name in files.list_names(paths.checkpoint(id)) if name.endswith(".void")]
    for path in (paths.void(id), *(paths.checkpoint(id) / name for name in names)):
        if files.exists(path):
            try:
                void = Void.load(files.get(path, limit=_MAX_VOID_BYTES), path=str(path))
            except DamagedError as error:
                return f"the reason cannot be read: {error}"
            return void.reason if void.reason.startswith("rank ") else f"rank {void.rank}: {void.reason}"
    return None


def read_manifest(paths: RunPaths, id: CheckpointId) -> Manifest:
    """The manifest of a checkpoint, checked against its place."""
    path = paths.manifest(id)
    manifest = Manifest.load(files.get(path, limit=_MAX_MANIFEST_BYTES), path=str(path))
    if manifest.id != id:
        raise DamagedError(f"{path}: speaks of {manifest.id}, lies in {id}", path=str(path), expected=str(id))
    if paths.known is not None:
        paths.known.note_manifest(manifest)
    return manifest


def read_record(paths: RunPaths, manifest: Manifest, rank: int = 0) -> Record:
    """A rank's record, checked against the manifest that names it, sizes of its files included."""
    ref = manifest.records[rank]
    path = paths.checkpoint(manifest.id) / ref.name
    data = files.get(path)
    digest = document_digest(data)
    if len(data) != ref.nbytes or digest != ref.digest:
        raise DamagedError(
            f"{path}: digest {digest}, the manifest says {ref.digest}",
            path=str(path),
            expected=ref.digest,
            found=digest,
        )
    record = Record.load(data, path=str(path))
    if record.id != manifest.id or record.run != manifest.run or record.owner.rank != rank:
        raise DamagedError(f"{path}: belongs to {record.id} of run {record.run}", path=str(path))
    for file in record.files:
        _check_size(paths.checkpoint(manifest.id) / file.name, file.nbytes)
    return record


def _check_size(path: Location, expected: int) -> None:
    found = files.facts(path)
    if found is None:
        raise DamagedError(f"{path}: No such file", path=str(path))
    if found.nbytes != expected:
        raise DamagedError(
            f"{path}: {found.nbytes} bytes, the record says {expected}",
            path=str(path),
            expected=expected,
            found=found.nbytes,
        )
