"""One round in a key-value store: every rank leaves a value, and all read one outcome.

Owns:    the keys of a round, who reads all values (the last to come, alone), and who decides when somebody is missing.
Not:     the store (torch's), and what to do when it hangs (distributed).
Holds:   the outcome is one key, written once, and the same for all: everybody's values joined, or who is missing. A
         rank makes the same few requests whatever the number of ranks; only the last one reads what each has left, in
         batches with a bound. No rank is special: a round needs nobody but those who take part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

from stepwell.ranks.groups.group import Absent
from stepwell.ranks.groups.joined import join, split

_WHOLE: Final = b"whole"
_ABSENT: Final = b"absent"
_PART_BYTES: Final = 4 << 20  # the TCP store takes values of up to 8 MiB
_FIRST_BYTES: Final = 64 << 10
"""Of a rank's value in its own key: many of these are read at once, so that they have a bound."""
_BATCH: Final = 256
_LATE_SECONDS: Final = 0.3
_LATE_SHARE: Final = 0.03


class Round:
    """One round of one rank. `meet` blocks until its end, and a little longer; the store may hold it up for ever."""

    def __init__(self, store: Any, key: str, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._key = key
        self._outcome, self._arrived, self._late = f"{key}/outcome", f"{key}/arrived", f"{key}/late"
        self._own: list[str] = []

    def _values(self, ranks: range) -> list[str]:
        return [f"{self._key}/{rank}" for rank in ranks]

    def meet(self, message: bytes, seconds: float) -> list[bytes]:
        """Everybody's message in rank order. Raises Absent, on all ranks alike, and RuntimeError of the store."""
        deadline = time.monotonic() + seconds
        mine = f"{self._key}/{self._rank}"
        self._own.append(mine)
        first, *rest = _cut(message, _FIRST_BYTES)
        for number, part in enumerate(rest, 1):
            self._own.append(f"{mine}/{number}")
            self._store.set(self._own[-1], part)
        # Last: whoever sees this key finds all parts.
        self._store.set(mine, b"%d %s" % (1 + len(rest), first))
        if self._store.add(self._arrived, 1) == self._size:
            verdict = self._conclude()
        elif self._is_decided(deadline - time.monotonic()):
            verdict = self._store.get(self._outcome)
        else:
            verdict = self._decide(seconds)
        return self._read(verdict)

    @property
    def own_keys(self) -> list[str]:
        """What this rank has left, to be deleted once everybody is in a later round: all have read this one then."""
        return self._own

    def _is_decided(self, seconds: float) -> bool:
        try:
            self._store.wait([self._outcome], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:  # the time is over; if the store is gone, the next request says so
            return False
        return True

    def _decide(self, seconds: float) -> bytes:
        """The time is over. The first to see it decides for all; the others only if they hear nothing of it."""
        is_first = self._store.add(self._late, 1) == 1
        if not is_first and self._is_decided(_LATE_SECONDS + _LATE_SHARE * seconds):
            return bytes(self._store.get(self._outcome))
        if missing := self._missing(range(self._size)):
            # The first to write decides for all, also for a rank that is only late.
            return self._write(_ABSENT, json.dumps([missing, seconds]).encode())
        return self._conclude()  # who came last has died over it

    def _missing(self, ranks: range) -> list[int]:
        """By halves: a few requests for each rank that is."""
        if self._store.check(self._values(ranks)):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._missing(ranks[:middle]) + self._missing(ranks[middle:])

    def _conclude(self) -> bytes:
        return self._write(_WHOLE, join(list(self._gather())))

    def _gather(self) -> Iterator[bytes]:
        ranks = range(self._size)
        for start in range(0, self._size, _BATCH):
            keys = self._values(ranks[start : start + _BATCH])
            for key, found in zip(keys, self._store.multi_get(keys), strict=True):
                number, _, first = found.partition(b" ")
                yield self._append(first, key, int(number))

    def _write(self, kind: bytes, data: bytes) -> bytes:
        """The outcome of the round, be it ours or that of somebody who was faster."""
        first, *rest = _cut(data, _PART_BYTES)
        for number, part in enumerate(rest, 1):
            self._store.set(f"{self._outcome}/{number}", part)
        return bytes(self._store.compare_set(self._outcome, "", b"%s %d %s" % (kind, 1 + len(rest), first)))

    def _read(self, verdict: bytes) -> list[bytes]:
        kind, number, first = verdict.split(b" ", 2)
        data = self._append(first, self._outcome, int(number))
        if kind == _ABSENT:
            raise Absent(*json.loads(data))
        if self._rank == 0:
            parts = (f"{self._outcome}/{part}" for part in range(1, int(number)))
            self._own += [self._outcome, *parts, self._arrived, self._late]
        return split(data, self._size)

    def _append(self, first: bytes, key: str, number: int) -> bytes:
        return first + b"".join(self._store.get(f"{key}/{part}") for part in range(1, number))


def _cut(data: bytes, first_bytes: int) -> Sequence[bytes]:
    """The first part, and the others: at least one."""
    starts = range(first_bytes, len(data), _PART_BYTES)
    return [data[:first_bytes], *(data[start : start + _PART_BYTES] for start in starts)]
