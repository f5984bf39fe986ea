"""The application's files: where it writes them, what they are called in a dataset, and how they come to their place.

    <home>/work/rank-00003/ckpt.5/model.pt     while it is written, and a second name of it while it is read
    <home>/step-000000000005.l0001/rank-00003.0000.file     in the dataset: a plain name, an opaque file of the record
    <prefix>/ckpt.5/model.pt                   when the dataset is in the prefix: a second name of the same bytes

Owns:    these names, the table in the record that maps one to the other, and the way from one to the next.
Holds:   a path of a table never leads out of the prefix, nor into our own directory; what the application wrote is
         moved, not copied, within one file system; a name in the prefix is replaced whole, and only by a whole dataset.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.format.checksum import PART_BYTES, BlockHasher
from stepwell.format.record import FileEntry, Record
from stepwell.store import files
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

FOLDER: Final = ".stepwell-scr"
"""Our directory in the prefix: a run directory as any other, with an index and a halt file."""
WORK: Final = "work"
MAX_PATH_BYTES: Final = 1024
PUBLISHED: Final = "published"
_TREE: Final = "stepwell.scr/1"


@dataclass(frozen=True)
class Description:
    """What a dataset is. `number`: the how many-th checkpoint it is; `paths`: of one rank, by name in the dataset."""

    name: str
    flags: int
    number: int
    paths: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> dict[str, object]:
        """As it lies in a record."""
        facts = {"format": _TREE, "name": self.name, "flags": self.flags, "number": self.number}
        return {**facts, "paths": dict(self.paths)}

    @classmethod
    def of(cls, record: Record) -> Description:
        """What a record says. Raises DamagedError for a record of something else, or a path that leads elsewhere."""
        tree = record.tree
        try:
            if tree["format"] != _TREE:
                raise DamagedError(f"{record.id}: not a dataset of the SCR interface")
            paths = {str(name): check_relative(str(path)) for name, path in tree["paths"].items()}
            found = cls(str(tree["name"]), int(tree["flags"]), int(tree["number"]), paths)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise DamagedError(f"{record.id}: not a dataset of the SCR interface: {error}") from error
        if set(found.paths) != {file.name for file in record.files}:
            raise DamagedError(f"{record.id}, rank {record.owner.rank}: its table and its files do not fit together")
        return found


def check_relative(path: str) -> str:
    """Refuse what leads out of the prefix, or into our own directory there."""
    parts = PurePosixPath(path).parts
    is_plain = bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
    if not is_plain or parts[0] == FOLDER or len(path.encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"{path!r}: not a path below the prefix")
    return str(PurePosixPath(path))


def relative_to(prefix: Path, path: str | os.PathLike[str]) -> str:
    """The path of a file below the prefix; relative ones count from the working directory, as SCR's. ConfigError."""
    text = os.fspath(path)
    if len(text.encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"route_file: a path of more than {MAX_PATH_BYTES} bytes: {text[:80]!r}...")
    plain = os.path.abspath(text)
    resolved = os.path.join(os.path.realpath(os.path.dirname(plain)), os.path.basename(plain))
    for path_of, root in ((plain, str(prefix)), (resolved, os.path.realpath(prefix))):
        relative = os.path.relpath(path_of, root)
        if relative != "." and relative.split(os.sep)[0] != "..":
            return check_relative(relative)
    raise ConfigError(f"route_file({text!r}): not below the prefix {prefix}; SCR_PREFIX says which that is")


class Work:
    """Where one rank writes and reads. Constructing only assigns."""

    def __init__(self, home: RunPaths, owner: Owner) -> None:
        assert isinstance(home.root, Path)
        self._root = home.root / WORK / owner.stem
        self.routed: dict[str, Path] = {}

    def clear(self) -> None:
        """Begin with nothing; what a broken-off output left goes. Names of files that are in a dataset stay there."""
        self.routed = {}
        shutil.rmtree(self._root, ignore_errors=True)

    def place(self, relative: str) -> Path:
        """Where a file is to be written; its directory is there."""
        place = self._root / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        self.routed[relative] = place
        return place

    def show(self, source: Path, relative: str) -> Path:
        """A verified file of a dataset under the name that the application knows it by; for reading."""
        place = self._root / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)
        return place


def look(place: Path) -> str | None:
    """Why what the application left there cannot be taken; None if it can."""
    try:
        found = os.lstat(place)
    except OSError as error:
        return f"{place}: {error.strerror}; route_file() named it, but nothing was written there"
    if not stat.S_ISREG(found.st_mode):
        return f"{place}: not a regular file"
    return None if os.access(place, os.R_OK) else f"{place}: cannot be read"


def take_in(
    work: Work, home: RunPaths, run: str, id: CheckpointId, owner: Owner, name: str, flags: int, number: int
) -> Record:
    """Make what was written part of the dataset, all but its record. On return it is durable. Raises OSError."""
    directory = home.checkpoint(id)
    assert isinstance(directory, Path)
    entries, paths = [], {}
    for at, (relative, place) in enumerate(sorted(work.routed.items())):
        final = directory / f"{owner.stem}.{at:04d}.file"
        entries.append(_seal(place, final.name))
        files.rename(place, final)
        paths[final.name] = relative
    files.sync_directory(directory)
    tree = Description(name, flags, number, paths).dump()
    return Record(run, id, owner, time.time(), tuple(entries), (), tree)


def _seal(place: Path, name: str) -> FileEntry:
    """Its bytes durable, and their checksums."""
    hasher, nbytes, room = BlockHasher(PART_BYTES), 0, memoryview(bytearray(PART_BYTES))
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        files.sync(fd, place)
        while got := os.readv(fd, [room]):
            hasher.update(room[:got])
            nbytes += got
    finally:
        os.close(fd)
    return FileEntry(name, "opaque", nbytes, PART_BYTES, hasher.finish())


def publish(prefix: Path, paths: RunPaths, records: Iterable[Record]) -> int:
    """Let the files of a whole dataset in the prefix appear where the application named them. Returns how many.

    By a second name for the same bytes; where the file system has none, by a copy. May be called again.
    """
    count, touched = 0, set()
    for record in records:
        directory = paths.checkpoint(record.id)
        for name, relative in Description.of(record).paths.items():
            source, target = directory / name, prefix / relative
            assert isinstance(source, Path)
            if not _is_same(source, target):
                target.parent.mkdir(parents=True, exist_ok=True)
                _replace(source, target)
                touched.add(target.parent)
            count += 1
    for folder in sorted(touched):
        files.sync_directory(folder)
    return count


def _is_same(source: Path, target: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(source), os.lstat(target))
    except OSError:
        return False


def _replace(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}{files.TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        try:
            files.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            try:
                files.sync(fd, temporary)
            finally:
                os.close(fd)
        files.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def withdraw(prefix: Path, paths: RunPaths, records: Iterable[Record]) -> None:
    """Remove the application's names of a dataset's files, and directories that this empties.

    A name that stands for other bytes by now is not touched.
    """
    folders: set[Path] = set()
    for record in records:
        directory = paths.checkpoint(record.id)
        for name, relative in Description.of(record).paths.items():
            source, target = directory / name, prefix / relative
            assert isinstance(source, Path)
            if _is_same(source, target) or _is_copy(record, name, target):
                target.unlink(missing_ok=True)
                folders.update(parent for parent in target.parents if prefix in parent.parents)
    for folder in sorted(folders, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_copy(record: Record, name: str, target: Path) -> bool:
    """Whether another file with these very bytes lies there: where there are no links."""
    entry = next(file for file in record.files if file.name == name)
    if look(target) is not None or target.stat().st_size != entry.nbytes:
        return False
    hasher = BlockHasher(entry.block_bytes)
    with target.open("rb", buffering=0) as source:
        while block := source.read(entry.block_bytes):
            hasher.update(memoryview(block))
    return hasher.finish() == entry.blocks
