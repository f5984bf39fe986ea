"""How far the trainer got, and who it is: 64 bytes, written by a thread of its own.

Owns:    the file `progress`. It outlives SIGKILL (the page cache keeps it), not a power loss, and nothing depends on
         it but reports: "12 steps redone", which processes are alive, which pid to kill in `stepwell prove`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import DamagedError
from stepwell.faults import file_operation
from stepwell.storage.store import files

_FORMAT = struct.Struct("<8sIIQIId16s")
_MAGIC = b"stepwel1"
_NBYTES = 4096


def boot_id() -> bytes:
    """16 bytes that change with every boot of this machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))


def pid_namespace() -> int:
    """Which set of process ids this process sees: containers of one machine share the boot id, not the pids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF
    except OSError:
        return 0


@dataclass(frozen=True)
class Progress:
    """Step `step` of lineage `lineage` was finished by process `pid`, whose agent is `agent_pid`, on boot `boot`."""

    lineage: int
    step: int
    pid: int
    agent_pid: int
    started: float
    boot: bytes
    namespace: int

    def is_here(self) -> bool:
        """Whether it was written on this boot and in this container, so that its pids mean something."""
        return self.boot == boot_id() and self.namespace == pid_namespace()


class ProgressFile:
    """The writer's side. Constructing only assigns. Without the file reports are poorer, nothing else.

    `later` runs a call on a thread of its own: a file system that hangs must not hold the training thread.
    """

    def __init__(self, path: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._path = path
        self._later = later
        self._fd = -1
        self._fixed: tuple[int, int, int, float, bytes] = (0, 0, 0, 0.0, bytes(16))
        self._namespace = 0
        self._latest = b""
        self._is_queued = False

    def open(self, *, lineage: int, agent_pid: int, step: int) -> None:
        """Take the file over, if that is possible."""
        with contextlib.suppress(OSError):
            file_operation("open", self._path)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._fixed = (lineage, os.getpid(), agent_pid, time.time(), boot_id())
        self._namespace = pid_namespace()
        self._latest = self._pack(step)
        self._write()  # at once: who looks now must not find the trainer before

    def _pack(self, step: int) -> bytes:
        lineage, pid, agent, started, boot = self._fixed
        return _FORMAT.pack(_MAGIC, lineage, self._namespace, step, pid, agent, started, boot)

    def update(self, step: int, agent_pid: int | None = None) -> None:
        """Note that `step` is finished. Never waits: only the newest note is written."""
        if self._fd < 0:
            return
        if agent_pid is not None:
            lineage, pid, _, started, boot = self._fixed
            self._fixed = (lineage, pid, agent_pid, started, boot)
        self._latest = self._pack(step)
        if not self._is_queued:
            self._is_queued = True
            self._later(self._write)

    def _write(self) -> None:
        self._is_queued = False
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # reports are poorer without it, nothing else
                os.pwrite(self._fd, self._latest, 0)

    def close(self) -> None:
        """Close the file, which stays. Comes after the thread has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_progress(path: Path) -> Progress | None:
    """What the last trainer wrote, or None."""
    try:
        data = files.get(path, limit=_NBYTES)
        magic, lineage, namespace, step, pid, agent_pid, started, boot = _FORMAT.unpack_from(data)
    except (OSError, DamagedError, struct.error):
        return None
    if magic != _MAGIC:
        return None
    return Progress(lineage, step, pid, agent_pid, started, boot, namespace)
