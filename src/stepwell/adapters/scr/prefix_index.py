"""What a prefix knows of its datasets beside the datasets themselves, and whether the job is to stop.

    .stepwell-scr/index.json     which one a restart is to use, which ones failed, which ones are not to be offered
    .stepwell-scr/halt.json      when to stop
    .stepwell-scr/lock           who may change them now

Owns:    these files, and the list of datasets in a prefix.
Not:     the datasets: a dataset exists by its manifest, and is described by its records.
Holds:   one writer at a time (rank 0, its flushing thread, or a command), by a lock where the file system has them,
         on a file that nobody else can open: who can read a file can lock it. Each file is replaced whole. A file that
         is damaged counts as absent: datasets are found without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from stepwell.adapters.scr.application_files import FOLDER, PUBLISHED, Description
from stepwell.errors import DamagedError, PersistError
from stepwell.events.run_events import logger
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.format.record import Record
from stepwell.storage.store import catalog, files
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

INDEX: Final = "stepwell.scr-index/1"
HALT: Final = "stepwell.scr-halt/1"
LOCK: Final = "lock"
FINALIZED: Final = "FINALIZE_CALLED"
TOLD: Final = "TOLD_TO_LEAVE"
"""With what follows: a rank got a signal, or a notice. The next job goes on."""
CHECKPOINT, OUTPUT = 1, 2
_MAX_BYTES: Final = 16 << 20
_LOCK_SECONDS: Final = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class Index:
    """current: the name that a person, or the newest flush, chose; is_pinned: by a person; holds until an output."""

    current: str = ""
    is_pinned: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def is_offered(self, id: CheckpointId) -> bool:
        """Whether a restart may use it."""
        return id.directory not in self.failed and id.directory not in self.dropped


@dataclass(frozen=True)
class Halt:
    """checkpoints_left: None is no limit; times are seconds since 1970, 0 is never."""

    reason: str = ""
    checkpoints_left: int | None = None
    exit_before: float = 0.0
    exit_after: float = 0.0
    seconds: float = 0.0

    @property
    def is_of_one_job(self) -> bool:
        """Whether the reason ends with the job that it was given in."""
        return self.reason == FINALIZED or self.reason.startswith(TOLD)

    def why(self, now: float, *, end_time: float, halt_seconds: float) -> str | None:
        """Why the job is to stop now, if it is."""
        margin = self.seconds or halt_seconds
        if self.reason and self.reason != FINALIZED:
            return self.reason
        if self.checkpoints_left is not None and self.checkpoints_left <= 0:
            return "NO_CHECKPOINTS_LEFT"
        if self.exit_before and now >= self.exit_before - margin:
            return "TIME_LIMIT: exit before"
        if self.exit_after and now >= self.exit_after:
            return "TIME_LIMIT: exit after"
        if end_time and margin and now >= end_time - margin:
            return "TIME_LIMIT: the allocation ends"
        return None


@dataclass(frozen=True)
class ListedDataset:
    """A dataset in the prefix, committed. `description` is None where its first record cannot be read."""

    id: CheckpointId
    manifest: Manifest
    description: Description | None
    is_live: bool

    @property
    def name(self) -> str:
        return self.description.name if self.description is not None else "?"


class Prefix:
    """The prefix directory, as one process sees it. Constructing only assigns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = RunPaths(root / FOLDER)

    @property
    def folder(self) -> Path:
        return self.root / FOLDER

    # -- the two files ------------------------------------------------------------------------------------------------

    def index(self) -> Index:
        """What the index says."""

        def parse(fields: Fields) -> Index:
            failed = {str(key): str(reason) for key, reason in dict(fields.raw("failed")).items()}
            dropped = tuple(str(name) for name in fields.items("dropped"))
            return Index(fields.text("current"), fields.flag("is_pinned"), failed, dropped)

        return self._read("index.json", INDEX, parse) or Index()

    def change_index(self, change: Callable[[Index], Index]) -> Index:
        """Read, change and replace it. Raises OSError."""
        with self._alone():
            changed = change(self.index())
            files.put(self.folder / "index.json", seal({"format": INDEX, **asdict(changed)}), point="index")
        return changed

    def drop(self, ids: Iterable[CheckpointId]) -> None:
        """Let a restart not use these; their files stay. Raises OSError."""
        names = [id.directory for id in ids]

        def change(index: Index) -> Index:
            return replace(index, dropped=(*index.dropped, *(name for name in names if name not in index.dropped)))

        self.change_index(change)

    def halt(self) -> Halt:
        """What the halt file says."""

        def parse(fields: Fields) -> Halt:
            left = fields.raw("checkpoints_left")
            times = (fields.number(key) for key in ("exit_before", "exit_after", "seconds"))
            return Halt(fields.text("reason"), left if type(left) is int else None, *times)

        return self._read("halt.json", HALT, parse) or Halt()

    def change_halt(self, change: Callable[[Halt], Halt]) -> Halt:
        """Read, change and replace it. Raises OSError."""
        with self._alone():
            found = self.halt()
            changed = change(found)
            if changed != found:
                files.put(self.folder / "halt.json", seal({"format": HALT, **asdict(changed)}), point="halt")
        return changed

    def count_checkpoint(self) -> None:
        """One more was made: one less is left."""

        def change(halt: Halt) -> Halt:
            left = halt.checkpoints_left
            return halt if left is None else replace(halt, checkpoints_left=max(0, left - 1))

        self.change_halt(change)

    def _read(self, name: str, kind: str, parse: Callable[[Fields], T]) -> T | None:
        path = self.folder / name
        if not files.exists(path):
            return None
        try:
            return parse(Fields(unseal(files.get(path, limit=_MAX_BYTES), path=str(path), kind=kind), path=str(path)))
        except (DamagedError, TypeError, ValueError) as error:
            logger.warning("%s; stepwell ignores it", error)
            return None

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PersistError(
                        f"another process has held {self.folder / LOCK} for {_LOCK_SECONDS:.0f} s; end it"
                    ) from None
            time.sleep(0.05)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without modes
                self._let_in_writers_alone(fd)
            with contextlib.suppress(OSError):  # a file system without locks: then there is one writer by custom
                self._lock(fd)
            yield
        finally:
            os.close(fd)

    def _let_in_writers_alone(self, fd: int) -> None:
        """Who can open the file can hold the lock: that is only for those who can write to the directory."""
        found, folder = os.fstat(fd), os.stat(self.folder).st_mode
        mode = 0o600 | (0o060 if folder & stat.S_IWGRP else 0) | (0o006 if folder & stat.S_IWOTH else 0)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(fd, mode)

    # -- datasets -----------------------------------------------------------------------------------------------------

    def datasets(self) -> list[ListedDataset]:
        """All committed ones, the newest first."""
        out = []
        for entry in catalog.scan(self.paths):
            if entry.manifest is not None:
                out.append(ListedDataset(entry.id, entry.manifest, self._describe(entry.manifest), entry.is_live))
        return out

    def _describe(self, manifest: Manifest) -> Description | None:
        for ref in manifest.records:
            path = self.paths.checkpoint(manifest.id) / ref.name
            with contextlib.suppress(DamagedError):
                return Description.of(Record.load(files.get(path), path=str(path)))
        return None

    def find(self, name: str) -> ListedDataset | None:
        """The newest one of that name."""
        return next((item for item in self.datasets() if item.name == name), None)

    def records(self, manifest: Manifest) -> list[Record]:
        """Of all ranks. Raises DamagedError."""
        return [catalog.read_record(self.paths, manifest, rank) for rank in range(manifest.world_size)]

    def is_published(self, id: CheckpointId) -> bool:
        """Whether its files were let appear at their places."""
        return files.exists(self.paths.checkpoint(id) / PUBLISHED)

    def set_current(self, name: str, *, is_pinned: bool) -> None:
        """Let a restart use that one; a mark that it failed goes. Raises OSError."""
        found = self.find(name)

        def change(index: Index) -> Index:
            if index.is_pinned and not is_pinned:
                return index
            directory = "" if found is None else found.id.directory
            failed = {key: reason for key, reason in index.failed.items() if key != directory}
            dropped = tuple(key for key in index.dropped if key != directory)
            return Index(name, is_pinned, failed, dropped)

        self.change_index(change)


def release_pin(index: Index) -> Index:
    """A new output follows what was chosen: from now on the newest counts again."""
    return replace(index, is_pinned=False)


def now() -> float:
    """Seconds since 1970."""
    return time.time()
