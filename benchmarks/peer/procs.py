"""A child with everything it started, wherever that went: found by a mark in the environment.

Owns:    CPU seconds over time, memory that is theirs, and their end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

MARK = "STEPWELL_BENCH_MARK"
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero (deleted)", "/SYSV")
_TICK = os.sysconf("SC_CLK_TCK")


class Family:
    """All processes whose environment carries our mark."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self._known: dict[int, bool] = {}
        self._cpu: dict[int, float] = {}

    def pids(self) -> list[int]:
        """Living members. Each process' environment is read once."""
        living = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in living - self._known.keys():
            with contextlib.suppress(OSError):
                self._known[pid] = self._needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        self._known = {pid: ours for pid, ours in self._known.items() if pid in living}
        return sorted(pid for pid, ours in self._known.items() if ours)

    def cpu_seconds(self) -> float:
        """User and system time of all members so far, the dead included."""
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICK
        return sum(self._cpu.values())

    def anonymous_bytes(self) -> int:
        """Private memory of all members, what they share by fork counted once."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss_Anon:"):
                        total += int(line.split()[1]) * 1024
        return total

    def shared_bytes(self) -> int:
        """Shared memory that members hold, mapped or only as a descriptor, each piece counted once."""
        pieces = {}
        for pid in self.pids():
            for link in _shared_links(pid):
                with contextlib.suppress(OSError):
                    found = os.stat(link)
                    pieces[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(pieces.values())

    def end(self) -> None:
        """End whatever is left."""
        for _ in range(50):
            left = [pid for pid in self.pids() if not _is_zombie(pid)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _shared_links(pid: int) -> list[str]:
    """Links in /proc to every memfd, POSIX shared memory and shared anonymous mapping of a process."""
    folder, found = f"/proc/{pid}", []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/fd/{name}").startswith(_SHARED):
                    found.append(f"{folder}/fd/{name}")
        for line in Path(f"{folder}/maps").read_text().splitlines():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith(_SHARED):
                found.append(f"{folder}/map_files/{parts[0]}")
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _machine_busy() -> float:
    """CPU seconds that the whole machine spent on anything."""
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / _TICK


def meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


class Sampler(threading.Thread):
    """Notes CPU seconds all the time, and memory only while asked to: looking at memory disturbs."""

    def __init__(self, family: Family, period: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._family, self._period = family, period
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._name: str | None = None
        self.cpu: list[tuple[float, float]] = []
        self._busy_before = (time.monotonic(), _machine_busy())
        self.memory: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        while not self._is_over.wait(self._period):
            self.cpu.append((time.monotonic(), self._family.cpu_seconds()))
            self.look()

    def look(self) -> None:
        """One sample of memory under the present name: peaks are kept."""
        with self._lock:
            if self._name is None:
                return
            system = meminfo()
            seen = {
                "anonymous": self._family.anonymous_bytes(),
                "shared": self._family.shared_bytes(),
                "system": system["MemTotal"]
                - system["MemFree"]
                - system["Buffers"]
                - system["Cached"]
                - system["SReclaimable"]
                + system["Shmem"],
            }
            seen["total"] = seen["anonymous"] + seen["shared"]
            old = self.memory.setdefault(self._name, seen)
            self.memory[self._name] = {key: max(value, old[key]) for key, value in seen.items()}

    def foreign_cores(self) -> float:
        """How many cores others kept busy on average since the start: a figure of a loaded machine says little."""
        started, busy = self._busy_before
        seconds = time.monotonic() - started
        ours = self.cpu[-1][1] if self.cpu else 0.0
        return max(0.0, (_machine_busy() - busy - ours) / max(seconds, 1e-3))

    def begin(self, name: str) -> None:
        self._name = name

    def finish(self) -> None:
        self.look()
        self._name = None

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def cpu_between(self, start: float, end: float) -> float:
        """CPU seconds spent in a window, by linear interpolation."""
        return self._cpu_at(end) - self._cpu_at(start)

    def _cpu_at(self, moment: float) -> float:
        before = after = None
        for at, value in self.cpu:
            if at <= moment:
                before = (at, value)
            else:
                after = (at, value)
                break
        if before is None or after is None:
            found = before or after
            return found[1] if found else 0.0
        share = (moment - before[0]) / (after[0] - before[0])
        return before[1] + share * (after[1] - before[1])
