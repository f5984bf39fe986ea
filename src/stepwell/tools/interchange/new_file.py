"""A file, or a folder of files, that is either there whole, or not at all.

Owns:    temporary name -> sync -> final name -> sync of the directory, for what lies outside of run directories.
Holds:   what is there is replaced only if asked for, and only by something complete; a failure leaves nothing behind. A
         folder is replaced only if all in it are names that an export writes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError
from stepwell.storage.store import files

_EXPORTED: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|\.metadata|__\d+_\d+\.distcp")
"""Names in the folders that an export writes."""


@dataclass(frozen=True)
class Written:
    """What an export did. `notes`: sentences on what is not as it was in the run."""

    nbytes: int
    tensors: int
    notes: list[str]


def check_target(out: Path, *, force: bool) -> None:
    """Refuse before any work what could not be written in the end."""
    if out.is_dir():
        raise ConfigError(f"{out} is a directory; give the name of the file to write", path=str(out))
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} exists; use --force to replace it", path=str(out))
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such directory; create it first", path=str(out.parent))


@contextlib.contextmanager
def new_file(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary path to write; it gets its name `out`, durably, when the block ends without an error."""
    check_target(out, force=force)
    temporary = out.with_name(f"{_unguessable(out)}{files.TEMPORARY}")
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            files.sync(fd, temporary)
        finally:
            os.close(fd)
        if force or not _link(temporary, out):
            files.rename(temporary, out)
        files.sync_directory(out.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _unguessable(out: Path) -> str:
    """The directory may be one that others can write to: a link under this name would lead elsewhere."""
    return f".{out.name}.{os.urandom(8).hex()}.{os.getpid()}"


def _link(temporary: Path, out: Path) -> bool:
    """Take the name only if it is free: `link` decides. False where the file system has no links."""
    try:
        os.link(temporary, out)
    except FileExistsError:
        raise ConfigError(f"{out} was created meanwhile; use --force to replace it", path=str(out)) from None
    except OSError:
        return False
    return True


def check_folder(out: Path, *, force: bool) -> None:
    """Refuse before any work what could not be written in the end."""
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir()):
        raise ConfigError(f"{out} is a file; give the name of a directory to write", path=str(out))
    names = sorted(os.listdir(out)) if out.is_dir() else []
    if names and not force:
        raise ConfigError(f"{out} exists; use --force to replace an earlier export", path=str(out))
    strange = [name for name in names if not _EXPORTED.fullmatch(name)]
    if strange:
        raise ConfigError(
            f"{out} contains {strange[0]}, which is not from an export; give another directory", path=str(out)
        )
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such directory; create it first", path=str(out.parent))


@contextlib.contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder to put files into; it gets its name `out`, durably, when the block ends without an error."""
    check_folder(out, force=force)
    temporary = out.with_name(f"{_unguessable(out)}{files.TEMPORARY}")
    old = out.with_name(f"{_unguessable(out)}.old{files.TEMPORARY}")
    os.mkdir(temporary)
    try:
        yield temporary
        for name in os.listdir(temporary):
            fd = os.open(temporary / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                files.sync(fd, temporary / name)
            finally:
                os.close(fd)
        files.sync_directory(temporary)
        check_folder(out, force=force)
        if force and out.is_dir() and os.listdir(out):
            files.rename(out, old)  # a kill right here leaves the old one under this name
        files.rename(temporary, out)
        files.sync_directory(out.parent)
    finally:
        for left in (temporary, old):
            _remove(left)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for name in os.listdir(folder):
            (folder / name).unlink()
        folder.rmdir()
