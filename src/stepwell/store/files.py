"""The few file operations everything durable is made of; each can be made to fail by a test.

Owns:    temporary name -> fsync -> final name -> fsync of the directory, in that order.
Holds:   a name that is visible holds complete bytes; after a failed fsync the file is thrown away, never synced
         again (the kernel may have dropped the pages and would answer "fine").
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.faults import crash_point, file_operation
from stepwell.format.document import MAX_DOCUMENT_BYTES

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


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
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


def make_directory(path: Path) -> None:
    """Create a directory and make its name durable; fine if it is there."""
    file_operation("mkdir", path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)  # even if it was there: whoever made it may have died, or failed, before this line


def list_names(path: Path) -> list[str]:
    """Names in a directory, sorted; none if it is not there. A link or a file in its place is damage."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(f"{path}: cannot be opened as a directory: {error.strerror}", path=str(path)) from error
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    file_operation("unlink", path)
    path.unlink(missing_ok=True)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    file_operation("rmdir", path)
    path.rmdir()


def link(source: Path, path: Path) -> None:
    """Give a file a second name. Raises FileExistsError if that is taken."""
    file_operation("link", path)
    os.link(source, path)


def put(path: Path, data: bytes, *, point: str) -> None:
    """Write a small file durably under its final name, replacing what was there."""
    temporary = _write_temporary(path, data)
    try:
        rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    crash_point(f"{point}.renamed")
    sync_directory(path.parent)
    crash_point(f"{point}.durable")


def put_new(path: Path, data: bytes, *, point: str) -> bool:
    """Like `put`, but never over an existing name: False if the name was taken. `link` decides who wins."""
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


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
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


def get(path: Path, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a small regular file whole. Larger than `limit` is damage, found before it is read."""
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


def _cannot() -> frozenset[int]:
    import errno

    return frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


_CANNOT: Final = _cannot()
