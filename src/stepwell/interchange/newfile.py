"""A file that is either there whole, or not at all.

Owns:    temporary name -> sync -> final name -> sync of the directory, for files outside of run directories.
Holds:   an existing file is replaced only if asked for, and only by a complete one; a failure leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.store import files


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
        raise ConfigError(f"{out} is there already; --force replaces it", path=str(out))
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such directory; make it first", path=str(out.parent))


@contextlib.contextmanager
def new_file(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary path to write; it gets its name `out`, durably, when the block ends without an error."""
    check_target(out, force=force)
    temporary = out.with_name(f".{out.name}.{os.getpid()}{files.TEMPORARY}")
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


def _link(temporary: Path, out: Path) -> bool:
    """Take the name only if it is free: `link` decides. False where the file system has no links."""
    try:
        os.link(temporary, out)
    except FileExistsError:
        raise ConfigError(f"{out} appeared meanwhile; --force replaces it", path=str(out)) from None
    except OSError:
        return False
    return True
