"""Directories that nobody else can change: a node's cache, and each directory on the way to it.

Owns:    what is asked of them, making them (0700), and what is said about one that does not fit.
Not:     run directories, which a group may share on purpose.
Holds:   after `make_private` no other user but root can put a file or directory in the place of one below the path:
         each directory on the way is root's or ours, and writable by nobody else, or sticky and only passed through.
         Every part is opened from the one before; a link counts only if it is root's or ours.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Final, NoReturn

from stepwell.errors import ConfigError

TRUST: Final = "STEPWELL_TRUST"
"""Directories, separated by colons, that are taken as they are: who can write to them is trusted."""
_MOST_LINKS: Final = 40
_WAY: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT: Final = 0


def make_private(path: Path, *, advice: str, may_be_passed: bool = False) -> None:
    """Make a directory that is this user's alone, or check that it is. Raises OSError.

    Raises ConfigError that names the directory in which somebody else could change something; `advice` says what to
    give in the place of the path. may_be_passed: a place like /tmp will do, in which a directory is still to be made.
    """
    _Way(Path(os.path.abspath(path)), advice, may_be_passed=may_be_passed).go()


class _Way:
    """One walk from `/` to a directory. Constructing only assigns."""

    def __init__(self, path: Path, advice: str, *, may_be_passed: bool) -> None:
        self._path, self._advice, self._may_be_passed = path, advice, may_be_passed
        self._trusted = _trusted()
        self._uid = os.geteuid()
        self._friends = {_ROOT, self._uid, _outside()}
        self._fd = -1
        self._links = 0

    def go(self) -> None:
        parts = list(self._path.parts[1:])
        self._enter(os.open("/", _WAY | os.O_DIRECTORY), Path("/"), is_last=not parts)
        here = Path("/")
        try:
            while parts:
                name = parts.pop(0)
                here = here.parent if name == ".." else here / name
                fd, facts = self._open(name, here)
                if not stat.S_ISLNK(facts.st_mode):
                    self._enter(fd, here, is_last=not parts)
                    continue
                target = self._read_link(fd, facts, here)
                parts[:0] = [part for part in Path(target).parts if part != "/"]
                here = here.parent
                if target.startswith("/"):
                    here = Path("/")
                    os.close(self._fd)
                    self._fd = os.open("/", _WAY | os.O_DIRECTORY)
        finally:
            os.close(self._fd)

    def _open(self, name: str, path: Path) -> tuple[int, os.stat_result]:
        """The next part, made if it is missing. The caller closes it."""
        try:
            fd = os.open(name, _WAY, dir_fd=self._fd)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another rank of this node
                os.mkdir(name, 0o700, dir_fd=self._fd)
            fd = os.open(name, _WAY, dir_fd=self._fd)
        except OSError as error:
            error.filename = str(path)
            raise
        return fd, os.fstat(fd)

    def _read_link(self, fd: int, facts: os.stat_result, path: Path) -> str:
        try:
            self._links += 1
            if facts.st_uid not in self._friends and str(path) not in self._trusted:
                self._refuse(path, f"is a link that belongs to {_user(facts.st_uid)}, who could let it lead elsewhere")
            if self._links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            return os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)

    def _enter(self, fd: int, path: Path, *, is_last: bool) -> None:
        """Go on from here, if nobody else can change what lies here."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        facts = os.fstat(fd)
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if str(path) in self._trusted:
            return
        is_last = is_last and not self._may_be_passed
        if facts.st_uid not in self._friends or (is_last and facts.st_uid != self._uid):
            self._refuse(path, f"belongs to {_user(facts.st_uid)}, who could put other files in the place of yours")
        others = _who_else(facts)
        if others and (is_last or not facts.st_mode & stat.S_ISVTX):
            is_ours = facts.st_uid == self._uid
            fix = f"if nobody but you did so far, `chmod go-w {path}`; else " if is_ours else ""
            self._refuse(path, f"may be written to by {others}, who could put other files in the place of yours", fix)

    def _refuse(self, path: Path, why: str, fix: str = "") -> NoReturn:
        way = "" if path == self._path else f", on the way to {self._path},"
        trust = f"or, if you trust all who can write there, set {TRUST}={path}"
        raise ConfigError(f"{path}{way} {why}; {fix}{self._advice}; {trust}", path=str(path))


def _trusted() -> frozenset[str]:
    named = [name for name in os.environ.get(TRUST, "").split(":") if name]
    for name in named:
        if not os.path.isabs(name):  # the agent works in another directory
            raise ConfigError(
                f"{TRUST}: {name!r} is not an absolute path; give whole paths, with colons between", found=name
            )
    return frozenset(path for name in named for path in (os.path.normpath(name), os.path.realpath(name)))


def _who_else(facts: os.stat_result) -> str | None:
    """Who, beside the owner and root, may write."""
    if facts.st_mode & stat.S_IWOTH:
        return "everybody"
    if facts.st_mode & stat.S_IWGRP and not _is_own_group(facts.st_gid):
        return f"group {_group(facts.st_gid)}"
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group is root's, or has nobody but this user in it: many systems give each user one of that kind."""
    if gid == _ROOT:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


def _outside() -> int:
    """What owners look like who have no number in this container's user namespace, root of the machine among them."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return _ROOT
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return _ROOT


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
