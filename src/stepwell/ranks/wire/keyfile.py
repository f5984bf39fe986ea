"""A secret in a file that only its user can read.

Owns:    making the file exclusively, and the checks each time it is read.
Holds:   the file never exists with half its content or with another mode. What is read is a regular file, reached
         through no link, owned by this user, that nobody else may read or write; everything else is refused with what
         to do. A file system that does not keep modes is found out before a secret is written to it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError
from stepwell.ranks.wire.secret import VARIABLE, draw_secret, key_of

_MODE: Final = 0o600
_MAX_BYTES: Final = 128
_ADVICE: Final = f"or set {VARIABLE} to the same 64 hex digits for all ranks (openssl rand -hex 32)"


def make_keyfile(path: Path) -> None:
    """Draw a secret into `path`, durable, unless something has that name already. Raises OSError, ConfigError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f"{path.name}.{int.from_bytes(os.urandom(4), 'little')}.{os.getpid()}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, _MODE, dir_fd=folder)
        try:
            os.fchmod(fd, _MODE)  # a umask takes bits away, and some file systems give them all
            _check(os.fstat(fd), path)
            os.write(fd, f"{draw_secret()}\n".encode())
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):  # somebody was faster, and that one counts
                os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(fd)
            os.unlink(temporary, dir_fd=folder)
        os.fsync(folder)
    finally:
        os.close(folder)


def read_keyfile(path: Path, *, to_look: bool = False) -> bytes:
    """The key in `path`. Raises FileNotFoundError, and ConfigError for a file that others can read or have made.

    to_look:  for who only looks which processes are alive: one that others can read too will do
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened: {error.strerror}; remove it, {_ADVICE}", path=str(path)) from None
    try:
        _check(os.fstat(fd), path, others=0 if to_look else 0o077)
        text = os.read(fd, _MAX_BYTES).decode(errors="replace")
    finally:
        os.close(fd)
    try:
        return key_of(text.removesuffix("\n"))
    except ConfigError:
        raise ConfigError(
            f"{path}: does not hold a secret; remove it, and the next start makes another one", path=str(path)
        ) from None


def _check(facts: os.stat_result, path: Path, others: int = 0o077) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path}: not a regular file; remove it, {_ADVICE}", path=str(path))
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: belongs to user {facts.st_uid}, and this process is user {os.geteuid()}; remove it, {_ADVICE}",
            path=str(path),
            expected=os.geteuid(),
            found=facts.st_uid,
        )
    if facts.st_mode & others:
        raise ConfigError(
            f"{path}: others can read or write it (mode {stat.S_IMODE(facts.st_mode):04o}, not {_MODE:04o}); remove "
            f"it, {_ADVICE}",
            path=str(path),
            expected=_MODE,
            found=stat.S_IMODE(facts.st_mode),
        )
