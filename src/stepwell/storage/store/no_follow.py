"""Names below a run, or below another directory that others may write to, without following links.

Owns:    which directories a run has (`lineage`, `chains` and checkpoints), and the way into them: each is opened
         without following a link, and what lies in it is named relative to that descriptor.
Not:     the run's own directory: the user names it, and may reach it over links.
Holds:   who swaps a directory of a run for a link causes an error, never a call that lands somewhere else. Errors name
         the whole path. Nothing is remembered between two calls, but where a command asks for it (`pinned`).

Every function takes whole paths, so a caller cannot forget the descriptor. `tests/arch` checks that nobody in the
packages that work below a run calls `os` or `shutil` past this module.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final

from stepwell.types import CheckpointId

_DIRECTORIES: Final = frozenset({"lineage", "chains"})
_WAY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_DEPTH: Final = 100
_pinned: dict[str, int] = {}
"""Of commands, which work on one run in one thread."""


def is_inside(directory: Path) -> bool:
    """Whether a directory has a name that only directories of a run have."""
    return _is_inside(directory.name)


@functools.lru_cache(maxsize=1024)
def _is_inside(name: str) -> bool:
    return name in _DIRECTORIES or CheckpointId.parse(name) is not None


class Holder:
    """What to pass to `os` for a path, within a `with` block: a name, and the descriptor of the directory it is in.

    A class, since `contextlib` costs as much as the call that is made in the block, and each commit has a hundred.
    """

    __slots__ = ("_fd", "_path")

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1

    def __enter__(self) -> tuple[str, int | None]:
        path = self._path
        directory = path.parent
        if _pinned and (fd := _pinned.get(str(directory))) is not None:
            return path.name, fd
        if not _is_inside(directory.name):
            return str(path), None
        self._fd = open_directory(directory, flags=_WAY)
        return path.name, self._fd

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if isinstance(error, OSError):
            _name_fully(error, self._path)


@contextlib.contextmanager
def pinned(root: Path) -> Iterator[None]:
    """Within this block a run's own directory stays the one that it is now, whatever is put in its place. OSError."""
    fd = os.open(root, _WAY)
    _pinned[str(root)] = fd
    try:
        yield
    finally:
        del _pinned[str(root)]
        os.close(fd)


def _name_fully(error: OSError, path: Path) -> None:
    if error.filename == path.name:
        error.filename = str(path)
    if error.filename2 == path.name:
        error.filename2 = str(path)


def open_directory(path: Path, *, follow: bool = True, flags: int = os.O_RDONLY) -> int:
    """A descriptor. A link is never followed to a directory of a run; else only with `follow`. Raises OSError."""
    if _pinned and (here := _pinned.get(str(path))) is not None:
        return os.open(".", flags | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    last = 0 if follow and not is_inside(path) else os.O_NOFOLLOW
    with Holder(path) as (name, fd):
        return os.open(name, flags | os.O_DIRECTORY | os.O_CLOEXEC | last, dir_fd=fd)


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
    """A descriptor; never of what a link points to, and without waiting for the other end of a pipe. Raises OSError."""
    with Holder(path) as (name, fd):
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=fd)


def create_file(path: Path, flags: int) -> int:
    """A file that nobody has open under another name: what was there goes, and is not written to. Raises OSError."""
    with Holder(path) as (name, fd):
        for _ in range(_MOST_DEPTH):
            try:
                return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=fd)
            except FileExistsError:  # a hard link to a file of somebody else must not be emptied
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        raise FileExistsError(errno.EEXIST, "somebody makes it again and again", str(path))


def lstat(path: Path) -> os.stat_result:
    """Facts about a name. Raises OSError."""
    with Holder(path) as (name, fd):
        return os.stat(name, dir_fd=fd, follow_symlinks=False)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a name. Raises OSError."""
    try:
        with Holder(path) as (name, fd):
            os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        if not missing_ok:
            raise


def mkdir(path: Path) -> None:
    """Make a directory. Raises OSError."""
    with Holder(path) as (name, fd):
        os.mkdir(name, dir_fd=fd)


def rmdir(path: Path) -> None:
    """Remove an empty directory. Raises OSError."""
    with Holder(path) as (name, fd):
        os.rmdir(name, dir_fd=fd)


def rename(source: Path, target: Path) -> None:
    """Give a file another name. Raises OSError."""
    with Holder(source) as (old, old_fd), Holder(target) as (new, new_fd):
        os.rename(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd)


def link(source: Path, target: Path) -> None:
    """Give a file a second name; a symbolic link gets one itself. Raises OSError."""
    with Holder(source) as (old, old_fd), Holder(target) as (new, new_fd):
        os.link(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)


# -- any depth below a directory that the caller names ----------------------------------------------------------------


@contextlib.contextmanager
def walk(base: Path, relative: str, *, make: bool = False, own_links: bool = False) -> Iterator[tuple[str, int]]:
    """The last name of `relative` and the descriptor of the directory it is in, each part opened from the one before.

    make:       directories that are missing are made
    own_links:  a link of this user's or root's on the way is followed. Else, and to anybody else's, OSError
    """
    *folders, name = PurePosixPath(relative).parts
    if ".." in (*folders, name) or relative.startswith("/"):
        raise OSError(errno.EINVAL, "leads out of its directory", relative)
    fd, path = open_directory(base, flags=_WAY), base
    try:
        for folder in folders:
            path = path / folder
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=fd)
            inner = _enter(fd, folder, path, own_links=own_links)
            os.close(fd)
            fd = inner
        yield name, fd
    except OSError as error:
        _name_fully(error, base / relative)
        raise
    finally:
        os.close(fd)


def _enter(fd: int, name: str, path: Path, *, own_links: bool) -> int:
    try:
        return os.open(name, _WAY | os.O_NOFOLLOW, dir_fd=fd)
    except NotADirectoryError as error:
        error.filename = str(path)
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if not own_links or not stat.S_ISLNK(found.st_mode):
            raise
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        if os.fstat(link).st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "a link of another user, which is not followed", str(path))
        return os.open(os.readlink("", dir_fd=link), _WAY, dir_fd=fd)
    finally:
        os.close(link)


def make_tree(base: Path, relative: str) -> None:
    """The directories of a path below `base`, all but its last name. Raises OSError."""
    with walk(base, relative, make=True):
        pass


def remove_tree(base: Path, relative: str) -> None:
    """Remove a directory and all that is in it; fine if it is not there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), walk(base, relative) as (name, fd):
        _remove(name, fd, _MOST_DEPTH)


def _remove(name: str, fd: int, depth: int) -> None:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except NotADirectoryError:
        return os.unlink(name, dir_fd=fd)
    try:
        for entry in os.listdir(inner):
            if not depth:
                raise OSError(errno.ELOOP, "directories are nested too deeply", name)
            with contextlib.suppress(FileNotFoundError):
                _remove(entry, inner, depth - 1)
    finally:
        os.close(inner)
    return os.rmdir(name, dir_fd=fd)
