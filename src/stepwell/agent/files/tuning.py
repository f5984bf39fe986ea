"""How many threads and how large writes a file system rewards: tried with the checkpoints' own bytes, then kept.

Owns:    the search, and what is remembered of it in the run directory (`storage.json`, advisory).
Not:     writing and timing (writer).
Holds:   whatever it says, the same bytes are written; a file that is damaged, missing or from elsewhere is ignored.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.errors import StepwellError
from stepwell.storage.format.checksum import BLOCK_BYTES
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.store import files
from stepwell.storage.store.mounts import file_system_type

KIND: Final = "stepwell.storage/1"
MAX_THREADS: Final = 16
WRITE_BYTES: Final = (4 << 20, 16 << 20, 1 << 20)
"""Sizes to try, in this order."""
_SEGMENT_BYTES: Final = 256 << 20
_WRITES_EACH: Final = 4  # a segment has at least so many writes for each thread
_ALIGNMENT: Final = 16 << 20
_LEAST_BYTES: Final = 32 << 20  # less says nothing about a disk
_TRIES: Final = 2
_GAIN: Final = 1.03
_SLOW, _SLOW_TIMES = 0.5, 3
_MAX_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Setting:
    """How an image is written."""

    threads: int
    write_bytes: int

    @property
    def unit_bytes(self) -> int:
        """What a thread takes at once: whole checksum blocks."""
        return max(self.write_bytes, BLOCK_BYTES)


def most_threads() -> int:
    """Threads that write mostly wait, so there may be more of them than cores, but not at any price."""
    return min(MAX_THREADS, 4 * len(os.sched_getaffinity(0)))


class Tuner:
    """Says how the next bytes are to be written, and learns from how long that took."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most_threads() if most is None else most
        self.setting = Setting(min(4, self._most), WRITE_BYTES[0])
        self.rate = 0.0
        self.news = ""
        """Why a setting was chosen that nobody was told of yet."""
        self._slow = 0
        self._is_recalled = False
        self._search: Generator[Setting, float, None] | None = None
        self._trial: Setting | None = None
        self._rates: list[float] = []
        self._begin("first large writes")

    def use(self, setting: Setting, rate: float) -> None:
        """Go on with what was remembered."""
        self.setting, self.rate, self._search, self._trial = setting, rate, None, None
        self._is_recalled = True

    def search_again(self, reason: str) -> None:
        """What was found out holds no more, unless it is from an earlier run: that one has seen everything."""
        if not self._is_recalled:
            self._begin(reason)

    @property
    def is_searching(self) -> bool:
        """Whether segments are written in different ways, to compare them."""
        return self._trial is not None

    def plan(self, nbytes: int) -> tuple[Setting, int]:
        """How to write the next bytes, of `nbytes` that are left, and how many of them."""
        setting = self._trial
        if setting is None or nbytes < _LEAST_BYTES:
            return self.setting, nbytes
        wanted = max(_SEGMENT_BYTES, setting.threads * setting.unit_bytes * _WRITES_EACH)
        wanted = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        return setting, nbytes if nbytes < 2 * wanted else wanted

    def note(self, setting: Setting, nbytes: int, seconds: float) -> None:
        """So long it took. Not for bytes that had to be waited for."""
        if nbytes < _LEAST_BYTES or seconds <= 0:
            return
        rate = nbytes / seconds
        if self._trial is None:
            self._slow = self._slow + 1 if rate < _SLOW * self.rate else 0
            if self._slow >= _SLOW_TIMES:
                self._begin(f"slower than half of {self.rate / 1e9:.1f} GB/s for {_SLOW_TIMES} checkpoints")
        elif setting == self._trial:
            self._rates.append(rate)
            if len(self._rates) == _TRIES:
                self._advance(max(self._rates))  # the best: noise only slows down

    def _begin(self, reason: str) -> None:
        self._slow = 0
        self._search = self._find(self.setting, reason)
        self._trial, self._rates = next(self._search), []

    def _advance(self, rate: float) -> None:
        assert self._search is not None
        self._rates = []
        try:
            self._trial = self._search.send(rate)
        except StopIteration:
            self._search = self._trial = None

    def _find(self, start: Setting, reason: str) -> Generator[Setting, float, None]:
        """More threads while that pays, else fewer, then other sizes. Yields what to try, gets how fast it was."""
        first = yield start
        best, rate = start, first
        for factor in (2.0, 0.5):
            threads = int(start.threads * factor)
            while 1 <= threads <= self._most:
                found = yield Setting(threads, start.write_bytes)
                if found < rate * _GAIN:
                    break
                best, rate = Setting(threads, start.write_bytes), found
                threads = int(threads * factor)
            if best != start:
                break
        for write_bytes in WRITE_BYTES:
            if write_bytes != start.write_bytes:
                found = yield Setting(best.threads, write_bytes)
                if found >= rate * _GAIN:
                    best, rate = Setting(best.threads, write_bytes), found
        self.setting, self.rate, self.news = best, rate, reason


# -- what is remembered ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WritePlace:
    """Which file system on which machine."""

    host: str
    file_system: str
    id: int

    @classmethod
    def of(cls, root: Path) -> WritePlace:
        """Where a directory lies. Raises OSError."""
        return cls(socket.gethostname(), file_system_type(root), os.statvfs(root).f_fsid)


def remember(path: Path, place: WritePlace, setting: Setting, rate: float) -> None:
    """Keep a choice for the next start. Raises OSError."""
    document = {
        "format": KIND,
        **vars(place),
        **vars(setting),
        "bytes_per_second": rate,
        "created": time.time(),
    }
    files.put(path, seal(document), point="storage")


def recall(path: Path, place: WritePlace) -> tuple[Setting, float] | None:
    """What was found out on this very file system; None if nothing, or nothing that can be believed."""
    try:
        fields = Fields(unseal(files.get(path, limit=_MAX_BYTES), path=str(path), kind=KIND), path=str(path))
        found = WritePlace(fields.text("host"), fields.text("file_system"), fields.integer("id", limit=1 << 64))
        setting = Setting(fields.integer("threads"), fields.integer("write_bytes"))
        rate = fields.number("bytes_per_second")
    except StepwellError:
        return None
    is_known = 1 <= setting.threads <= most_threads() and setting.write_bytes in WRITE_BYTES
    return (setting, rate) if found == place and is_known and rate > 0 else None
