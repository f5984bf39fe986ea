"""What a run learned about itself: how often it fails, what a restart takes, what checkpoints cost.

Owns:    `history.json`. Advisory: it outlives SIGKILL (the page cache keeps it), not a power loss; what cannot be read
         is learned again.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.faults import file_operation
from stepwell.storage.format.document import seal, unseal
from stepwell.storage.store import files

KIND: Final = "stepwell.history/1"
_MAX_BYTES: Final = 1 << 16
RUNNING, CLOSED, FAILED, TOLD = "running", "closed", "failed", "told to leave"
"""How the last process ended. One that is `running` when the next one starts died."""


@dataclass(frozen=True)
class Learned:
    """`uptime` and `failures` are of the processes before; `seconds` and `ended` of the last one.

    checkpoint, durable:  what a checkpoint took from training, and until its commit, in seconds
    measured_on:          what these two depend on: they hold for nothing else
    """

    uptime: float = 0.0
    failures: int = 0
    seconds: float = 0.0
    ended: str = CLOSED
    restart: float | None = None
    checkpoint: float | None = None
    durable: float | None = None
    measured_on: dict[str, str] = field(default_factory=dict)

    def next(self) -> Learned:
        """As the next process of the run begins with it."""
        failures = self.failures + (self.ended in (RUNNING, FAILED))
        return replace(self, uptime=self.uptime + self.seconds, failures=failures, seconds=0.0, ended=RUNNING)

    def mtbf(self, prior: float | None) -> float | None:
        """Mean seconds between failures: `prior` counts as one that was seen; None while nothing is known."""
        uptime, failures = self.uptime + self.seconds, self.failures
        if prior is not None:
            uptime, failures = uptime + prior, failures + 1
        return uptime / failures if failures else None


def read_history(path: Path) -> Learned:
    """What the file holds; an empty history if there is none that can be read."""
    try:
        document = unseal(files.get(path, limit=_MAX_BYTES), path=str(path), kind=KIND)
    except (OSError, DamagedError):
        return Learned()
    values: dict[str, Any] = {key: document.get(key) for key in asdict(Learned())}
    return Learned(**values) if _is_sound(values) else Learned()


def _is_sound(values: dict[str, Any]) -> bool:
    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12

    measured = values["measured_on"]
    return (
        all(number(values[key]) for key in ("uptime", "failures", "seconds"))
        and isinstance(values["failures"], int)
        and values["ended"] in (RUNNING, CLOSED, FAILED, TOLD)
        and all(values[key] is None or number(values[key]) for key in ("restart", "checkpoint", "durable"))
        and isinstance(measured, dict)
        and all(isinstance(item, str) for item in measured.values())
    )


class HistoryFile:
    """The writer's side. `later` runs a call on a thread of its own, so that no file system holds training up."""

    def __init__(self, path: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._path = path
        self._later = later
        self._fd = -1

    def open(self) -> Learned:
        """Take the file over. Returns what it held. Raises OSError."""
        found = read_history(self._path)
        file_operation("open", self._path)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        return found

    def update(self, history: Learned) -> None:
        """Write it down, soon."""
        if self._fd >= 0:
            data = seal({"format": KIND, **asdict(history)})
            self._later(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # learned again
                os.pwrite(self._fd, data, 0)
                os.ftruncate(self._fd, len(data))

    def close(self) -> None:
        """Close the file, which stays. Comes after the thread has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def age_of_this_process() -> float:
    """Seconds since it was started: what a restart took so far."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        since_boot = float(file.read().split()[0])
    age = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    return age if math.isfinite(age) and age > 0 else 0.0
