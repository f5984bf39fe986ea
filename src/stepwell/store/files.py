"""The few operations everything durable is made of; each can be made to fail by a test.

Owns:    temporary name -> fsync -> final name -> fsync of the directory, in that order.
Holds:   a name that is visible holds complete bytes; after a failed fsync the file is thrown away, never synced
         again (the kernel may have dropped the pages and would answer "fine").

What takes a `Location` works in a bucket too (`objects`), where a name is durable as soon as it is there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.faults import crash_point, file_operation
from stepwell.format.document import MAX_DOCUMENT_BYTES
from stepwell.store import objects
from stepwell.store.objects import Facts, Location, ObjectPath

TEMPORARY: Final = ".tmp"
"""Ending of every file that is not there yet."""


def create(path: Path, *, direct: bool = False, reuse: bool = False) -> int:
    """Open a temporary file for writing: a fresh one, or with `reuse` one that is there and is overwritten whole.

    Falls back to buffered writing where O_DIRECT is not known.
    """
    file_operation("open", path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if reuse else os.O_TRUNC)
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:
            pass  # tmpfs of older kernels, some network and FUSE file systems
    return os.open(path, flags, 0o644)


def write_at(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write all of `data`, however the kernel cuts it up."""
    while data:
        allowed = file_operation("write", path, len(data))
        written = os.pwrite(fd, data[:allowed], offset)
        if written <= 0:
            raise OSError(f"write to {path} made no progress")
        data, offset = data[written:], offset + written


def truncate(fd: int, nbytes: int, path: Path) -> None:
    """Cut off what was written beyond the end."""
    file_operation("truncate", path)
    os.ftruncate(fd, nbytes)


def preallocate(fd: int, nbytes: int, path: Path) -> None:
    """Reserve space, so that a full disk shows before the bytes are written. Not every file system can."""
    file_operation("fallocate", path)
    if nbytes:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise


def sync(fd: int, path: Path) -> None:
    """Make the file's bytes durable."""
    file_operation("fsync", path)
    os.fsync(fd)


def sync_directory(path: Location) -> None:
    """Make the names in a directory durable."""
    if isinstance(path, ObjectPath):
        return
    file_operation("fsync_dir", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Give a complete, synced file its final name."""
    file_operation("rename", target)
    os.rename(source, target)


def make_directory(path: Location) -> None:
    """Create a directory and make its name durable; fine if it is there. A bucket needs none."""
    if isinstance(path, ObjectPath):
        return
    file_operation("mkdir", path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)  # even if it was there: whoever made it may have died, or failed, before this line


def exists(path: Location) -> bool:
    """Whether a name is there, whatever it is. Raises StorageError."""
    if isinstance(path, ObjectPath):
        return facts(path) is not None
    return os.path.lexists(path)


def is_directory(path: Location) -> bool:
    """Whether it is a directory and no link to one; in a bucket whether something lies below it."""
    if isinstance(path, ObjectPath):
        return objects.is_directory(path)
    return path.is_dir() and not path.is_symlink()


def facts(path: Location) -> Facts | None:
    """Size and time of a file, links not followed; None if it is not there. Raises OSError."""
    try:
        if isinstance(path, ObjectPath):
            return objects.facts(path)
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return Facts(found.st_size, found.st_mtime, f"{found.st_dev}.{found.st_ino}")


def list_facts(path: Location) -> dict[str, Facts]:
    """Size and time of the files in a directory; none if it is not there."""
    if isinstance(path, ObjectPath):
        return {name: found for name, found in objects.list_facts(path).items() if found is not None}
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as items:
        stats = {item.name: item.stat(follow_symlinks=False) for item in items}
        return {name: Facts(s.st_size, s.st_mtime) for name, s in stats.items() if stat.S_ISREG(s.st_mode)}
    return {}


def directory_facts(path: Location) -> Facts:
    """Size of the files in a directory, and when it changed last. Raises FileNotFoundError."""
    inside = list_facts(path).values()
    if isinstance(path, ObjectPath):
        if not inside:
            raise FileNotFoundError(f"{path}: nothing is there")
        changed = max(found.modified for found in inside)
    else:
        changed = os.lstat(path).st_mtime
    return Facts(sum(found.nbytes for found in inside), changed)


def list_names(path: Location, *, follow: bool = False) -> list[str]:
    """Names in a directory, sorted; none if it is not there. A file, or a link without `follow`, is damage."""
    if isinstance(path, ObjectPath):
        return sorted(objects.list_facts(path))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(f"{path}: cannot be opened as a directory: {error.strerror}", path=str(path)) from error
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def remove(path: Location) -> None:
    """Remove a file if it is there."""
    if isinstance(path, ObjectPath):
        return objects.remove(path)
    file_operation("unlink", path)
    path.unlink(missing_ok=True)
    return None


def remove_directory(path: Location) -> None:
    """Remove an empty directory. In a bucket there is none any more."""
    if isinstance(path, ObjectPath):
        return
    file_operation("rmdir", path)
    path.rmdir()


def link(source: Path, path: Path) -> None:
    """Give a file a second name. Raises FileExistsError if that is taken."""
    file_operation("link", path)
    os.link(source, path)


def share(source: Location, path: Location) -> None:
    """Let a name stand for the bytes of another one, in the place of what was there. Raises OSError."""
    if isinstance(path, ObjectPath):
        assert isinstance(source, ObjectPath)
        return objects.copy(source, path)
    assert isinstance(source, Path)
    remove(path)
    return link(source, path)


def put(path: Location, data: bytes, *, point: str) -> None:
    """Write a small file durably under its final name, replacing what was there."""
    if isinstance(path, ObjectPath):
        objects.put(path, data)
        crash_point(f"{point}.durable")
        return
    temporary = _write_temporary(path, data)
    try:
        rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    crash_point(f"{point}.renamed")
    sync_directory(path.parent)
    crash_point(f"{point}.durable")


def put_new(path: Location, data: bytes, *, point: str) -> bool:
    """Like `put`, but never over an existing name: False if the name was taken. `link` decides who wins."""
    if isinstance(path, ObjectPath):
        crash_point(f"{point}.written")
        is_ours = objects.put_new(path, data)
        crash_point(f"{point}.linked")
        return is_ours
    temporary = _write_temporary(path, data)
    crash_point(f"{point}.written")
    is_ours = True
    try:
        link(temporary, path)
    except FileExistsError:
        is_ours = False
    except FileNotFoundError:
        if not path.exists():
            raise
        is_ours = False  # the winner has swept our temporary file away
    finally:
        temporary.unlink(missing_ok=True)
    if is_ours:
        crash_point(f"{point}.linked")
    sync_directory(path.parent)  # even if the name was taken: its owner may have died before this line
    return is_ours


@contextlib.contextmanager
def written_for_now(path: Location, data: bytes) -> Iterator[None]:
    """A durable file that exists within this block."""
    if isinstance(path, ObjectPath):
        objects.put(path, data)
        yield
        return objects.remove(path)
    temporary = _write_temporary(path, data)
    try:
        yield
    finally:
        temporary.unlink(missing_ok=True)


def _write_temporary(path: Path, data: bytes) -> Path:
    # Not by the process alone: those of other containers, or machines, have the same numbers, and one that begins to
    # write under this name would empty what another one has just linked.
    token = int.from_bytes(os.urandom(4), "little")
    temporary = path.with_name(f"{path.name}.{token}.{os.getpid()}{TEMPORARY}")
    fd = create(temporary)
    try:
        write_at(fd, memoryview(data), 0, temporary)
        sync(fd, temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return temporary


def open_regular(path: Path, *, direct: bool = False) -> int:
    """Open for reading; a link, a pipe or a directory in the place of a file is damage."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = -1
    if direct:
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            fd = -1
    try:
        if fd < 0:
            fd = os.open(path, flags)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be opened: {error.strerror}", path=str(path)) from error
    if not _is_regular(fd):
        os.close(fd)
        raise DamagedError(f"{path}: not a regular file", path=str(path))
    return fd


def _is_regular(fd: int) -> bool:
    return (os.fstat(fd).st_mode & 0o170000) == 0o100000


def get(path: Location, *, limit: int = MAX_DOCUMENT_BYTES, is_constant: bool = False) -> bytes:
    """Read a small regular file whole. Larger than `limit` is damage, found before it is read.

    `is_constant`: it never changes once it is there, so that a bucket is asked for it once.
    """
    if isinstance(path, ObjectPath):
        return _get_object(path, limit, is_constant=is_constant)
    fd = open_regular(path)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > limit:
            raise DamagedError(
                f"{path}: {nbytes} bytes, more than {limit}", path=str(path), expected=limit, found=nbytes
            )
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(nbytes + 1)  # never `limit`: Python allocates what it is asked for
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    finally:
        os.close(fd)


def _get_object(path: ObjectPath, limit: int, *, is_constant: bool) -> bytes:
    try:
        data = (objects.get_constant if is_constant else objects.get)(path, limit)
    except FileNotFoundError as error:
        raise DamagedError(str(error), path=str(path)) from error
    if len(data) > limit:
        raise DamagedError(f"{path}: more than {limit} bytes", path=str(path), expected=limit)
    return data


def _cannot() -> frozenset[int]:
    import errno

    return frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


_CANNOT: Final = _cannot()
