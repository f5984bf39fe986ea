"""A second user of the machine, for attacks that one user alone cannot show.

`as_user` does something as another user and brings back what came of it; `living_stranger` keeps that user's process,
and the sockets it has open, as long as a block. Skips without root, since only root can be somebody else.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (the stranger may not be allowed to read our Python: what it needs is there before)
import json
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

STRANGER: Final = 54321
VICTIM: Final = 54322
FRIENDS: Final = 54320
"""A group with both in it."""
SECONDS: Final = 60.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a second user of this machine")


def as_user(uid: int, act: Callable[[], Any], *, groups: tuple[int, ...] = ()) -> Any:
    """Do it as that user, in a forked process. Returns what it returned, or the exception that it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0)
            try:
                found = act()
            except Exception as error:
                found = error if type(error) in (OSError, *OSError.__subclasses__()) else _plain(error)
            os.write(writing, pickle.dumps(found))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    assert data, "the other user's process ended with nothing: look at its traceback"
    return pickle.loads(data)


def _plain(error: Exception) -> Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")


@pytest.fixture
def machine() -> Iterator[Path]:
    """A directory that all users of the machine may pass through; `shm` in it is as /dev/shm."""
    root = Path(tempfile.mkdtemp(prefix="stepwell-hostile-"))
    root.chmod(0o755)
    (root / "shm").mkdir()
    (root / "shm").chmod(0o1777)
    yield root
    shutil.rmtree(root)


def swap(directory: Path, target: Path) -> None:
    """What somebody who may write to a run does: a link in the place of one of its directories."""
    os.rename(directory, directory.with_name(f"{directory.name}.was"))
    os.symlink(target, directory)


def as_stranger(act: Callable[[], Any]) -> Any:
    """What `act` returns (JSON), done by the other user; an OSError it raises is returned by its name."""
    with living_stranger(act) as said:
        return said


@contextmanager
def living_stranger(act: Callable[[], Any]) -> Iterator[Any]:
    """As above, and the other user's process lives as long as the block: it keeps the sockets that `act` left open."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            kept: list[Any] = []
            try:
                kept.append(act())
                said = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
            except OSError as error:
                said = type(error).__name__
            theirs.sendall(json.dumps(said).encode() + b"\n")
            theirs.recv(1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(SECONDS)
    try:
        with ours.makefile("rb") as stream:
            line = stream.readline()
            assert line, "the stranger died; its error is above"
            yield json.loads(line)
    finally:
        ours.close()
        _end(pid)


def _end(pid: int) -> None:
    deadline = time.monotonic() + SECONDS
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
