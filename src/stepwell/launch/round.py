"""What torchrun takes for the store of a round. Nothing of it goes over the network.

Owns:    the two things torchrun's agent does with that store: telling the ranks of its workers, and waiting for the
         other agents at the end.
Holds:   no call waits for a node that may be dead: with the same number of workers on every node the ranks follow from
         the slot, and the end is in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]

_ROLE: Final = "torchelastic/role_info/"
_RANKS: Final = "torchelastic/assigned_ranks/"


class RoundStore(Store):
    """Knows the calls that the agent of torch 2.13 makes."""

    def __init__(
        self, slot: int, slots: int, on_workers: Callable[[int], None], on_end: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._slot = slot
        self._slots = slots
        self._on_workers = on_workers
        self._on_end = on_end
        self._role: dict[str, Any] = {}
        self._seconds = 300.0

    # The ranks of the workers

    def set(self, key: str, value: str | bytes) -> None:
        """This agent says how many workers it starts."""
        if key.startswith(_ROLE):
            self._role = json.loads(value)
            self._on_workers(int(self._role["local_world_size"]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The agent of slot 0 asks what the others said: the same."""
        return [json.dumps({**self._role, "rank": int(key.removeprefix(_ROLE))}).encode() for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """The agent of slot 0 tells the others what follows: they know."""

    def get(self, key: str) -> bytes:
        """The ranks of this agent's workers: first rank and world size, of the job and of the role."""
        if not key.startswith(_RANKS):
            raise NotImplementedError(f"torchrun asks for {key}, which this version of stepwell does not know")
        workers = int(self._role["local_world_size"])
        first, world = self._slot * workers, self._slots * workers
        return json.dumps([first, world, first, world]).encode()

    # The end

    @property
    def timeout(self) -> timedelta:
        """How long `wait` may take."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set before the barrier at the end."""
        self._seconds = timeout.total_seconds()

    def add(self, key: str, amount: int) -> int:
        """First act of the barrier; never the last to come, so that `wait` is what ends it."""
        return 0

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until the workers of all nodes ended."""
        self._on_end(self._seconds if timeout is None else timeout.total_seconds())
