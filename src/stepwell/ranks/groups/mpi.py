"""The group of MPI, through the mpi4py module that the user has imported.

Owns:    a communicator of our own, so that our messages and the program's do not meet.
Not:     MPI's collectives: one that waits for a dead rank neither returns nor says for whom. Every rank sends to every
         other one, and knows who is missing by who has not sent.
Holds:   no call into MPI waits, and no thread of ours makes one: with MPI_THREAD_FUNNELED call from the main thread,
         with MPI_THREAD_SERIALIZED not beside other calls. A rank that gives up tells the others: they give up too, at
         their next call at the latest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from stepwell.ranks.groups.group import Absent, Group

_VALUE: Final = 0
_GIVEN_UP: Final = 1
_SHORTEST_PAUSE: Final = 2e-5
_LONGEST_PAUSE: Final = 5e-3


class MpiGroup(Group):
    """All ranks of COMM_WORLD. The communicator is not freed by `close`, which would have to wait for all."""

    def __init__(self, mpi: Any) -> None:
        super().__init__(rank=mpi.COMM_WORLD.Get_rank(), size=mpi.COMM_WORLD.Get_size())
        self._mpi = mpi
        self._comm: Any = None
        self._sends: dict[int, Any] = {}
        self._notices: dict[int, Any] = {}

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        others = [rank for rank in range(self.size) if rank != self.rank]
        missing = set(others)
        try:
            if self._comm is None:
                comm, request = self._mpi.COMM_WORLD.Idup()
                if not _poll(request.Test, deadline):
                    raise Absent([], seconds, ": MPI does not say which")
                self._comm = comm
            self._sends = self._send(data, _VALUE, others)
            answers = {self.rank: data}
            receives: dict[int, tuple[Any, bytearray]] = {}

            def is_complete() -> bool:
                self._receive(missing, receives, answers)
                self._look_for_notice()  # after the values: it was sent after them
                self._sends = {rank: send for rank, send in self._sends.items() if not send.Test()}
                return not missing and not self._sends

            if not _poll(is_complete, deadline):
                absent = sorted(missing or self._sends)
                self._notices = self._send(json.dumps([absent, seconds]).encode(), _GIVEN_UP, others)
                raise Absent(absent, seconds)
        except self._mpi.Exception as error:
            raise Absent(sorted(missing), seconds, f": MPI says {error}") from error
        return [answers[rank] for rank in range(self.size)]

    def _send(self, data: bytes, tag: int, ranks: list[int]) -> dict[int, Any]:
        return {rank: self._comm.Isend([data, self._mpi.BYTE], dest=rank, tag=tag) for rank in ranks}

    def _receive(
        self, missing: set[int], receives: dict[int, tuple[Any, bytearray]], answers: dict[int, bytes]
    ) -> None:
        """Take what has come from the ranks that are still missing."""
        for rank in sorted(missing):
            if rank not in receives and (begun := self._begin(rank, _VALUE)):
                receives[rank] = begun
            if rank in receives and receives[rank][0].Test():
                answers[rank] = bytes(receives[rank][1])
                missing.discard(rank)

    def _begin(self, source: int, tag: int) -> tuple[Any, bytearray] | None:
        status = self._mpi.Status()
        message = self._comm.Improbe(source=source, tag=tag, status=status)
        if message is None:
            return None
        room = bytearray(status.Get_count(self._mpi.BYTE))
        return message.Irecv([room, self._mpi.BYTE]), room

    def _look_for_notice(self) -> None:
        if notice := self._begin(self._mpi.ANY_SOURCE, _GIVEN_UP):
            notice[0].Wait()  # a few bytes, which came with the probe
            raise Absent(*json.loads(notice[1]))


def _poll(claim: Callable[[], bool], deadline: float) -> bool:
    """Ask until it is so, ever less often; False when the time is over."""
    pause = _SHORTEST_PAUSE
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return True
