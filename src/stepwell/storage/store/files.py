"""The few operations everything durable is made of; each can be made to fail by a test.

Owns:    temporary name -> fsync -> final name -> fsync of the directory, in that order.
Holds:   a name that is visible holds complete bytes; after a failed fsync the file is thrown away, never synced
         again (the kernel may have dropped the pages and would answer "fine").

What takes a `Location` works in a bucket too (`objects`), where a name is durable as soon as it is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError, StorageError
from stepwell.faults import crash_point, file_operation
from stepwell.storage.format.document import MAX_DOCUMENT_BYTES
from stepwell.storage.store import no_follow, objects
from stepwell.storage.store.objects import Location, ObjectFacts, ObjectPath
from stepwell.storage.store.passing_errors import intact, patiently

TEMPORARY: Final = ".tmp"
"""Ending of every file that is not there yet."""


def create(path: Path, *, direct: bool = False, reuse: bool = False) -> int:
    """Open a temporary file for writing: a fresh one, or with `reuse` one that is there and is overwritten whole.

    Falls back to buffered writing where O_DIRECT is not known.
    """
    file_operation("open", path)
    if direct:
        try:
            return _create(path, os.O_WRONLY | os.O_DIRECT, reuse=reuse)
        except OSError:
            pass  # tmpfs of older kernels, some network and FUSE file systems
    return _create(path, os.O_WRONLY, reuse=reuse)


def _create(path: Path, flags: int, *, reuse: bool) -> int:
    if reuse:
        with contextlib.suppress(FileNotFoundError):
            fd = no_follow.open_file(path, flags)
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
                return fd
            os.close(fd)  # somebody put another file under this name: that one is not to be overwritten
    return no_follow.create_file(path, flags)


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
    fd = no_follow.open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Give a complete, synced file its final name."""
    file_operation("rename", target)
    no_follow.rename(source, target)


def make_directory(path: Location, *, is_synced: bool = True) -> None:
    """Create a directory and make its name durable; fine if it is there. A bucket needs none."""
    if isinstance(path, ObjectPath):
        return
    file_operation("mkdir", path)
    with contextlib.suppress(FileExistsError):
        no_follow.mkdir(path)
    if is_synced:  # even if it was there: whoever made it may have died, or failed, before this line
        sync_directory(path.parent)


def exists(path: Location) -> bool:
    """Whether a name is there, whatever it is. Raises StorageError."""
    if isinstance(path, ObjectPath):
        return facts(path) is not None
    try:
        patiently(path, lambda: no_follow.lstat(path))
    except StorageError:
        raise
    except (OSError, ValueError):
        return False
    return True


def appeared(directory: Location, name: str) -> bool:
    """Whether a name is in a directory now. It is opened first: a network file system then looks anew."""
    if isinstance(directory, ObjectPath):
        return exists(directory / name)
    try:
        fd = no_follow.open_directory(directory, follow=False)
    except FileNotFoundError:
        return False
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
    return True


def is_directory(path: Location) -> bool:
    """Whether it is a directory and no link to one; in a bucket whether something lies below it."""
    if isinstance(path, ObjectPath):
        return objects.is_directory(path)
    try:
        return stat.S_ISDIR(patiently(path, lambda: no_follow.lstat(path)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def facts(path: Location) -> ObjectFacts | None:
    """Size and time of a file, links not followed; None if it is not there. Raises OSError."""
    try:
        if isinstance(path, ObjectPath):
            return objects.facts(path)
        found = patiently(path, lambda: no_follow.lstat(path))
    except FileNotFoundError:
        return None
    return ObjectFacts(found.st_size, found.st_mtime, f"{found.st_dev}.{found.st_ino}")


def list_facts(path: Location) -> dict[str, ObjectFacts]:
    """Size and time of the files in a directory; none if it is not there."""
    if isinstance(path, ObjectPath):
        return {name: found for name, found in objects.list_facts(path).items() if found is not None}
    try:
        fd = patiently(path, lambda: no_follow.open_directory(path))
    except (FileNotFoundError, NotADirectoryError):  # a link in the place of a checkpoint is none
        return {}
    stats = {}
    try:
        with os.scandir(fd) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    stats[item.name] = item.stat(follow_symlinks=False)
    finally:
        os.close(fd)
    return {name: ObjectFacts(s.st_size, s.st_mtime) for name, s in stats.items() if stat.S_ISREG(s.st_mode)}


def list_names(path: Location, *, follow: bool = False) -> list[str]:
    """Names in a directory, sorted; none if it is not there. A file, or a link without `follow`, is damage."""
    if isinstance(path, ObjectPath):
        return sorted(objects.list_facts(path))

    return intact(path, "cannot be opened as a directory", lambda: _list(path, follow=follow))


def _list(path: Path, *, follow: bool) -> list[str]:
    try:
        fd = no_follow.open_directory(path, follow=follow)
    except FileNotFoundError:
        return []
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def remove(path: Location) -> None:
    """Remove a file if it is there."""
    if isinstance(path, ObjectPath):
        return objects.remove(path)
    file_operation("unlink", path)
    no_follow.unlink(path, missing_ok=True)
    return None


def discard(path: Path) -> None:
    """Remove a temporary file, if it is there."""
    no_follow.unlink(path, missing_ok=True)


def remove_directory(path: Location) -> None:
    """Remove an empty directory. In a bucket there is none any more."""
    if isinstance(path, ObjectPath):
        return
    file_operation("rmdir", path)
    no_follow.rmdir(path)


@contextlib.contextmanager
def unless_gone(path: Location) -> Iterator[None]:
    """Remove a directory in here: one that another process has removed meanwhile is no error."""
    try:
        yield
    except FileNotFoundError:
        if exists(path):
            raise


def link(source: Path, path: Path) -> None:
    """Give a file a second name. Raises FileExistsError if that is taken."""
    file_operation("link", path)
    no_follow.link(source, path)


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
    _place(_write_temporary(path, data), path)
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
        if not exists(path):
            raise
        is_ours = False  # the winner has swept our temporary file away
    finally:
        discard(temporary)
    if is_ours:
        crash_point(f"{point}.linked")
    sync_directory(path.parent)  # even if the name was taken: its owner may have died before this line
    return is_ours


def put_hint(path: Location, data: bytes) -> None:
    """Write a small file whole, replacing what was there, and sync nothing: with power it may be lost, or damaged."""
    if isinstance(path, ObjectPath):
        objects.put(path, data)
    else:
        _place(_write_temporary(path, data, is_synced=False), path)


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
        discard(temporary)


def _place(temporary: Path, path: Path) -> None:
    try:
        rename(temporary, path)
    except OSError:
        discard(temporary)
        raise


def _write_temporary(path: Path, data: bytes, *, is_synced: bool = True) -> Path:
    # Not by the process alone: those of other containers, or machines, have the same numbers, and one that begins to
    # write under this name would empty what another one has just linked.
    token = int.from_bytes(os.urandom(4), "little")
    temporary = path.with_name(f"{path.name}.{token}.{os.getpid()}{TEMPORARY}")
    fd = create(temporary)
    try:
        write_at(fd, memoryview(data), 0, temporary)
        if is_synced:
            sync(fd, temporary)
    except OSError:
        discard(temporary)
        raise
    finally:
        os.close(fd)
    return temporary


def open_regular(path: Path, *, direct: bool = False) -> int:
    """Open for reading; a link, a pipe or a directory in the place of a file is damage. Raises StorageError."""
    fd = -1
    if direct:
        with contextlib.suppress(OSError):
            fd = no_follow.open_file(path, os.O_RDONLY | os.O_DIRECT)
    if fd < 0:
        fd = intact(path, "cannot be opened", lambda: no_follow.open_file(path, os.O_RDONLY))
    if not _is_regular(fd):
        os.close(fd)
        raise DamagedError(f"{path}: not a regular file", path=str(path))
    return fd


def _is_regular(fd: int) -> bool:
    return (os.fstat(fd).st_mode & 0o170000) == 0o100000


def get(path: Location, *, limit: int = MAX_DOCUMENT_BYTES, is_constant: bool = False) -> bytes:
    """Read a small regular file whole. Larger than `limit` is damage, found before it is read.

    `is_constant`: it never changes once it is there, so that a bucket is asked for it once. Raises StorageError for
    what says nothing about its bytes.
    """
    if isinstance(path, ObjectPath):
        return _get_object(path, limit, is_constant=is_constant)
    return intact(path, "cannot be read", lambda: _read_whole(path, limit))


def _read_whole(path: Path, limit: int) -> bytes:
    fd = open_regular(path)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > limit:
            raise DamagedError(
                f"{path}: {nbytes} bytes, more than {limit}", path=str(path), expected=limit, found=nbytes
            )
        data = b""
        while piece := os.read(fd, nbytes + 1 - len(data)):  # never `limit`: Python allocates what it is asked for
            data += piece
        return data
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


_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
