"""The group of Horovod, through the `horovod.torch` module that the user has imported.

Owns:    two tensor names for each group.
Holds:   no call waits longer than its deadline. Horovod does not tell who is missing: the error names nobody. Its own
         warning does, in the output of rank 0, after HOROVOD_STALL_CHECK_TIME_SECONDS (60).
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import torch

from stepwell.ranks.groups.group import Absent, Group

_PAUSE_SECONDS: Final = 0.001
_numbers = itertools.count()


class HorovodGroup(Group):
    """All ranks of Horovod."""

    def __init__(self, hvd: Any) -> None:
        super().__init__(rank=hvd.rank(), size=hvd.size())
        self._hvd = hvd
        # The same names in every round: new ones would push training's out of Horovod's cache.
        self._name = f"stepwell.{next(_numbers)}"

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(data)]), f"{self._name}.size", seconds, deadline).tolist()
        joined = self._gather(mine, f"{self._name}.data", seconds, deadline)
        room = bytearray(len(joined))
        torch.frombuffer(room, dtype=torch.uint8).copy_(joined)
        ends = itertools.accumulate(sizes)
        return [bytes(room[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def _gather(self, mine: torch.Tensor, name: str, seconds: float, deadline: float) -> torch.Tensor:
        try:
            handle = self._hvd.allgather_async(mine, name=name)
            while not self._hvd.poll(handle):
                if time.monotonic() > deadline:
                    raise Absent([], seconds, ": Horovod does not say which, its warning on rank 0 does")
                time.sleep(_PAUSE_SECONDS)
            gathered: torch.Tensor = self._hvd.synchronize(handle)
        except RuntimeError as error:  # HorovodInternalError, when a rank is gone
            raise Absent([], seconds, f": Horovod says {error}") from error
        return gathered
