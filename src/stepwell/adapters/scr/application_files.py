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
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.faults import file_operation
from stepwell.storage.format.checksum import PART_BYTES, BlockHasher
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import files, no_follow
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

FOLDER: Final = ".stepwell-scr"
"""Our directory in the prefix: a run directory as any other, with an index and a halt file."""
WORK: Final = "work"
MAX_PATH_BYTES: Final = 1024
PUBLISHED: Final = "published"
_TREE: Final = "stepwell.scr/1"
_PERMISSIONS: Final = 0o777
_END_OF_TIME: Final = 1 << 62


@dataclass(frozen=True)
class KeptFile:
    """What belongs to a file beside its bytes: permissions, and the time of its last change in nanoseconds."""

    mode: int
    changed: int

    @classmethod
    def read(cls, mode: int, changed: int) -> KeptFile:
        """From a record, which anybody may have written. Raises ValueError or TypeError."""
        if not 0 <= changed < _END_OF_TIME:
            raise ValueError(f"{changed} is not a time")
        return cls(int(mode) & _PERMISSIONS, int(changed))

    def give_back(self, fd: int) -> None:
        """Let an open file have it again. Raises OSError."""
        os.fchmod(fd, self.mode)
        os.utime(fd, ns=(self.changed, self.changed))


@dataclass(frozen=True)
class Description:
    """What a dataset is. `number`: the how many-th checkpoint it is; `paths`: of one rank, by name in the dataset."""

    name: str
    flags: int
    number: int
    paths: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, KeptFile] = field(default_factory=dict)

    def dump(self) -> dict[str, object]:
        """As it lies in a record."""
        facts = {"format": _TREE, "name": self.name, "flags": self.flags, "number": self.number}
        kept = {name: [one.mode, one.changed] for name, one in self.kept.items()}
        return {**facts, "paths": dict(self.paths), **({"kept": kept} if kept else {})}

    @classmethod
    def of(cls, record: Record) -> Description:
        """What a record says. Raises DamagedError for a record of something else, or a path that leads elsewhere."""
        tree = record.tree
        try:
            if tree["format"] != _TREE:
                raise DamagedError(f"{record.id}: not a dataset of the SCR interface")
            paths = {str(name): check_relative(str(path)) for name, path in tree["paths"].items()}
            told = dict(tree.get("kept", {})).items()
            kept = {str(name): KeptFile.read(*facts) for name, facts in told}
            found = cls(str(tree["name"]), int(tree["flags"]), int(tree["number"]), paths, kept)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise DamagedError(f"{record.id}: not a dataset of the SCR interface: {error}") from error
        if set(found.paths) != {file.name for file in record.files}:
            raise DamagedError(f"{record.id}, rank {record.owner.rank}: its table does not match its files")
        return found


def check_relative(path: str) -> str:
    """Refuse what leads out of the prefix, or into our own directory there."""
    parts = PurePosixPath(path).parts
    is_plain = bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
    if not is_plain or parts[0] == FOLDER or len(path.encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"{path!r}: not a path under the prefix")
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
    raise ConfigError(f"route_file({text!r}): not under the prefix {prefix}; SCR_PREFIX sets the prefix")


class Work:
    """Where one rank writes and reads. Constructing only assigns."""

    def __init__(self, home: RunPaths, owner: Owner) -> None:
        assert isinstance(home.root, Path)
        self._home, self._folder = home.root, f"{WORK}/{owner.stem}"
        self.routed: dict[str, Path] = {}

    def clear(self) -> None:
        """Begin with nothing; what a broken-off output left goes. Names of files that are in a dataset stay there."""
        self.routed = {}
        clear_work(self._home, self._folder)

    def place(self, relative: str) -> Path:
        """Where a file is to be written; its directory is there."""
        no_follow.make_tree(self._home, f"{self._folder}/{relative}")
        self.routed[relative] = self._home / self._folder / relative
        return self.routed[relative]

    def held(self, relative: str) -> contextlib.AbstractContextManager[tuple[str, int]]:
        """The name of a routed file, and the descriptor of its directory. Raises OSError."""
        return no_follow.walk(self._home, f"{self._folder}/{relative}")

    def show(self, source: Path, relative: str, kept: KeptFile | None = None) -> Path:
        """A verified file of a dataset under the name that the application knows it by; for reading."""
        no_follow.make_tree(self._home, f"{self._folder}/{relative}")
        with self.held(relative) as (name, fd):
            _remove(name, fd)
            _second_name(source, name, fd, kept)
        return self._home / self._folder / relative


def clear_work(home: Path, folder: str = WORK) -> None:
    """Remove what is left of outputs: all, or that of one rank. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        no_follow.remove_tree(home, folder)


def _second_name(source: Path, name: str, directory: int, kept: KeptFile | None, *, sync: bool = False) -> None:
    """Another name for the bytes of a file, which must be free; where there are no links, a copy. Raises OSError."""
    reading = files.open_regular(source)
    try:
        try:
            with no_follow.Holder(source) as (old, old_fd):
                file_operation("link", source)
                os.link(old, name, src_dir_fd=old_fd, dst_dir_fd=directory, follow_symlinks=False)
        except OSError:  # other file systems, or one without links
            is_linked = False
        else:
            is_linked = True
        if is_linked:
            return None if kept is None else kept.give_back(reading)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        writing = os.open(name, flags, 0o644, dir_fd=directory)
        try:
            with open(reading, "rb", closefd=False) as out_of, open(writing, "wb", closefd=False) as into:
                shutil.copyfileobj(out_of, into)
            if sync:
                files.sync(writing, source)
            if kept is not None:
                kept.give_back(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return None


def look(place: Path) -> str | None:
    """Why what the application left there cannot be taken; None if it can."""
    try:
        found = os.lstat(place)
    except OSError as error:
        return f"{place}: {error.strerror}; route_file() named it, but the program wrote nothing there"
    if not stat.S_ISREG(found.st_mode):
        return f"{place}: not a regular file"
    return None if os.access(place, os.R_OK) else f"{place}: cannot be read"


def take_in(
    work: Work, home: RunPaths, run: str, id: CheckpointId, owner: Owner, about: Description, *, keep: bool
) -> Record:
    """Make what was written part of the dataset, all but its record. On return it is durable. Raises OSError.

    keep:  permissions and times of the files too
    """
    directory = home.checkpoint(id)
    assert isinstance(directory, Path)
    entries, paths, kept = [], {}, {}
    for at, relative in enumerate(sorted(work.routed)):
        final = directory / f"{owner.stem}.{at:04d}.file"
        with work.held(relative) as (name, fd), no_follow.Holder(final) as (new, new_fd):
            entries.append(_seal(work.routed[relative], name, fd, final.name))
            file_operation("rename", final)
            os.rename(name, new, src_dir_fd=fd, dst_dir_fd=new_fd)
        paths[final.name] = relative
        if keep:
            found = no_follow.lstat(final)
            kept[final.name] = KeptFile(found.st_mode & _PERMISSIONS, found.st_mtime_ns)
    files.sync_directory(directory)
    tree = replace(about, paths=paths, kept=kept).dump()
    return Record(run, id, owner, time.time(), tuple(entries), (), tree)


def _seal(place: Path, written: str, directory: int, name: str) -> FileEntry:
    """Its bytes durable, and their checksums."""
    hasher, nbytes, room = BlockHasher(PART_BYTES), 0, memoryview(bytearray(PART_BYTES))
    fd = os.open(written, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
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
        about = Description.of(record)
        for name, relative in about.paths.items():
            source, target = directory / name, prefix / relative
            assert isinstance(source, Path)
            if not _is_same(source, target):
                _replace(source, prefix, relative, about.kept.get(name))
                touched.add(target.parent)
            count += 1
    for folder in sorted(touched):
        files.sync_directory(folder)
    return count


def _is_same(source: Path, target: Path) -> bool:
    try:
        return os.path.samestat(no_follow.lstat(source), os.lstat(target))
    except OSError:
        return False


def _replace(source: Path, prefix: Path, relative: str, kept: KeptFile | None) -> None:
    with no_follow.walk(prefix, relative, make=True, own_links=True) as (name, fd):
        temporary = f".{name[:200]}.{os.getpid()}{files.TEMPORARY}"
        _remove(temporary, fd)
        try:
            _second_name(source, temporary, fd, kept, sync=True)
            file_operation("rename", prefix / relative)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            _remove(temporary, fd)


def _remove(name: str, directory: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


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
                with no_follow.walk(prefix, relative, own_links=True) as (last, fd):
                    _remove(last, fd)
                folders.update(parent for parent in target.parents if prefix in parent.parents)
    for folder in sorted(folders, key=lambda path: -len(path.parts)):
        with (
            contextlib.suppress(OSError),
            no_follow.walk(prefix, str(folder.relative_to(prefix)), own_links=True) as at,
        ):
            os.rmdir(at[0], dir_fd=at[1])


def _is_copy(record: Record, name: str, target: Path) -> bool:
    """Whether another file with these very bytes lies there: where there are no links."""
    entry = next(file for file in record.files if file.name == name)
    if look(target) is not None or os.lstat(target).st_size != entry.nbytes:
        return False
    hasher = BlockHasher(entry.block_bytes)
    with open(files.open_regular(target), "rb", buffering=0) as source:
        while block := source.read(entry.block_bytes):
            hasher.update(memoryview(block))
    return hasher.finish() == entry.blocks
