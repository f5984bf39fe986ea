"""The group of torch.distributed, over its key-value store.

Owns:    the keys `stepwell/...` of the store, a prefix for each round (rounds); the end of a store that hangs.
Not:     the collectives: they belong to training. Ours would have to come in the same order as its own on every rank,
         one that does not return takes the process group with it, and gloo does not say who is missing.
Holds:   all ranks agree whether a round took place. A call also ends when the store does not answer, because its
         process is gone or stopped: it runs on a thread that can be left behind. One round is in the store, and what
         the ranks have not yet cleared away of the one before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from stepwell.errors import ConfigError
from stepwell.ranks.groups.group import Absent, Group
from stepwell.ranks.groups.store_rounds import Round

_CLOSE_SECONDS: Final = 2.0

T = TypeVar("T")


class DistributedGroup(Group):
    """The default process group of torch.distributed, whatever its backend."""

    def __init__(self) -> None:
        super().__init__(rank=dist.get_rank(), size=dist.get_world_size())
        self._store: Any = None
        self._prefix = ""
        self._number = 0
        self._old_keys: list[str] = []

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        try:
            # More than the wait below: who comes in the last moment still has to read what the others left.
            return _within(1.0 + 1.1 * seconds, lambda: self._trade(data, seconds))
        except (TimeoutError, RuntimeError) as error:  # torch raises RuntimeError and what derives from it
            raise self._no_store(seconds, error) from error

    def _trade(self, data: bytes, seconds: float) -> list[bytes]:
        if self._store is None:
            self._store = _connect()
        if not self._prefix:
            # Counted in the store, not in the process: a restarted process would begin at the old keys again.
            self._prefix = f"stepwell/{self._store.add(f'stepwell/opened/{self.rank}', 1)}"
        this = Round(self._store, f"{self._prefix}/{self._number}", self.rank, self.size)
        self._number += 1
        answers = this.meet(data, seconds)
        # Everybody is in this round, so everybody has read the one before.
        for key in self._old_keys:
            self._store.delete_key(key)
        self._old_keys = this.own_keys
        return answers

    def _no_store(self, seconds: float, error: Exception) -> Absent:
        if _is_store_outside():
            return Absent([], seconds, f": the store that torchrun holds does not answer ({error})")
        return Absent([0], seconds, f": it holds the store of the process group, which does not answer ({error})")

    def rest(self) -> None:
        """The process that has the store holds a descriptor for each connection: it is given back."""
        if self._store is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):
                _within(_CLOSE_SECONDS, lambda: self._store.set(self._closed(self.rank), ""))
            self._store = None

    def _leave(self) -> None:
        """The store may end with rank 0, which therefore waits until the others have read the last round."""
        self.rest()
        if self._prefix and self.is_leader and not _is_store_outside():
            # ValueError: training has let go of its process group already, and so of the store.
            with contextlib.suppress(TimeoutError, RuntimeError, ValueError, ConfigError):
                _within(_CLOSE_SECONDS, self._wait_for_others)

    def _wait_for_others(self) -> None:
        keys = [self._closed(rank) for rank in range(self.size)]
        _connect().wait(keys, timedelta(seconds=_CLOSE_SECONDS))

    def _closed(self, rank: int) -> str:
        return f"{self._prefix}/closed/{self._number}/{rank}"


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
