"""The group of torch.distributed, over its key-value store.

Owns:    the keys `stepwell/...` of the store, one set for each round.
Not:     the collectives: they belong to training. Ours would have to come in the same order as its own on every rank,
         one that does not return takes the process group with it, and gloo does not say who is missing.
Holds:   all ranks agree whether a round took place: its outcome is one key, written once. Whoever comes later reads the
         same. A call also ends when the store does not answer, because its process is gone or stopped: it runs on a
         thread that can be left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from stepwell.errors import ConfigError
from stepwell.groups.group import Absent, Group

_WHOLE: Final = "whole"
_PART_BYTES: Final = 4 << 20  # the TCP store takes values of up to 8 MiB
_CLOSE_SECONDS: Final = 2.0

T = TypeVar("T")


class DistributedGroup(Group):
    """The default process group of torch.distributed, whatever its backend."""

    def __init__(self) -> None:
        super().__init__(rank=dist.get_rank(), size=dist.get_world_size())
        self._store: Any = None
        self._prefix = ""
        self._round = 0
        self._old_keys: list[str] = []

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        try:
            # More than the wait below: who comes in the last moment still has to read what the others left.
            return _within(1.0 + 1.1 * seconds, lambda: self._trade(data, seconds))
        except (TimeoutError, RuntimeError) as error:  # torch raises RuntimeError and what derives from it
            raise self._no_store(seconds, error) from error

    def _trade(self, data: bytes, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        if self._store is None:
            self._store = _connect()
            # Counted in the store, not in the process: a restarted process would begin at the old keys again.
            self._prefix = f"stepwell/{self._store.add(f'stepwell/opened/{self.rank}', 1)}"
        store, round_key = self._store, f"{self._prefix}/{self._round}"
        outcome, arrived = f"{round_key}/outcome", f"{round_key}/arrived"
        values = [f"{round_key}/{rank}" for rank in range(self.size)]
        self._round += 1
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        mine = values[self.rank]
        for number, part in enumerate(parts[1:], 1):
            store.set(f"{mine}/{number}", part)
        # Last: whoever sees this key finds all parts.
        store.set(mine, b"%d %s" % (len(parts), parts[0]))
        if store.add(arrived, 1) == self.size:
            store.compare_set(outcome, "", _WHOLE)
        try:
            store.wait([outcome], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:  # the time is over; if the store is gone, the next line says so
            missing = [rank for rank, key in enumerate(values) if not store.check([key])]
            # The first to write decides for all, also for a rank that is only late.
            store.compare_set(outcome, "", json.dumps([missing, seconds]) if missing else _WHOLE)
        verdict = store.get(outcome).decode()
        if verdict != _WHOLE:
            raise Absent(*json.loads(verdict))
        answers = [_read(store, key, first) for key, first in zip(values, store.multi_get(values), strict=True)]
        # Everybody is in this round, so everybody has read the one before.
        for key in self._old_keys:
            store.delete_key(key)
        self._old_keys = [mine, *(f"{mine}/{number}" for number in range(1, len(parts)))]
        if self.is_leader:
            self._old_keys += [outcome, arrived]
        return answers

    def _no_store(self, seconds: float, error: Exception) -> Absent:
        if _is_store_outside():
            return Absent([], seconds, f": the store that torchrun holds does not answer ({error})")
        return Absent([0], seconds, f": it holds the store of the process group, which does not answer ({error})")

    def _leave(self) -> None:
        if self._store is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):
                _within(_CLOSE_SECONDS, self._say_goodbye)
            self._store = None

    def _say_goodbye(self) -> None:
        """The store may end with rank 0, which therefore waits until the others have read the last round."""
        keys = [f"{self._prefix}/closed/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        if self.is_leader and not _is_store_outside():
            self._store.wait(keys, timedelta(seconds=_CLOSE_SECONDS))


def _is_store_outside() -> bool:
    """Whether torchrun holds the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect() -> Any:
    """A connection of our own: a wait keeps everybody else from using it."""
    store: Any = _get_default_store()
    if store is None:
        raise ConfigError(
            f"torch.distributed with backend {dist.get_backend()} has no store to talk over; with MPI, import mpi4py"
        )
    return store.clone()


def _read(store: Any, key: str, first: bytes) -> bytes:
    count, _, data = first.partition(b" ")
    return data + b"".join(store.get(f"{key}/{number}") for number in range(1, int(count)))


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or TimeoutError; a call into a store whose process is stopped never returns."""
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="stepwell-group")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return answers[0]
