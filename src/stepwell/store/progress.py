"""How far the trainer got, and who it is: 64 bytes in a mapped file, so that a step costs no system call.

Owns:    the file `progress`. It outlives SIGKILL (the page cache keeps it), not a power loss, and nothing depends on
         it but reports: "12 steps redone", which processes are alive, which pid to kill in `stepwell prove`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import DamagedError
from stepwell.faults import file_operation
from stepwell.store import files

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
    """The writer's side. Constructing only assigns; `open` maps the file and may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._fixed: tuple[int, int, int, float, bytes] = (0, 0, 0, 0.0, bytes(16))
        self._namespace = 0

    def open(self, *, lineage: int, agent_pid: int) -> None:
        """Map the file and take it over."""
        file_operation("open", self._path)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.posix_fallocate(fd, 0, _NBYTES)  # a full disk shows here, not as a bus error in a store to the map
            self._map = mmap.mmap(fd, _NBYTES)
        finally:
            os.close(fd)
        self._fixed = (lineage, os.getpid(), agent_pid, time.time(), boot_id())
        self._namespace = pid_namespace()

    def update(self, step: int, agent_pid: int | None = None) -> None:
        """Note that `step` is finished."""
        if self._map is None:
            return
        lineage, pid, agent, started, boot = self._fixed
        if agent_pid is not None:
            agent = agent_pid
            self._fixed = (lineage, pid, agent, started, boot)
        _FORMAT.pack_into(self._map, 0, _MAGIC, lineage, self._namespace, step, pid, agent, started, boot)

    def close(self) -> None:
        """Unmap. The file stays."""
        if self._map is not None:
            self._map.close()
            self._map = None


def read_progress(path: Path) -> Progress | None:
    """What the last trainer wrote, or None."""
    try:
        data = files.get(path, limit=_NBYTES)
        magic, lineage, namespace, step, pid, agent_pid, started, boot = _FORMAT.unpack_from(data)
    except (DamagedError, struct.error):
        return None
    if magic != _MAGIC:
        return None
    return Progress(lineage, step, pid, agent_pid, started, boot, namespace)
