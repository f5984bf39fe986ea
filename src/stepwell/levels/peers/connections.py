"""The agents of the other ranks, each asked over a connection that is made when it is needed.

Holds:   who cannot be asked says nothing, and is not asked again for a moment, which grows: a node that hangs costs
         those who ask it a few seconds now and then.
"""

from __future__ import annotations

import time
from typing import Any, Final

from stepwell.levels.assignments import Orders
from stepwell.levels.peers.fetch import Peer
from stepwell.levels.peers.tls import NAME, client_context
from stepwell.types import CheckpointId

_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 3.0
_MOST_OPEN: Final = 64
_PAUSE_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Peers:
    """Of one run, for the agent of `rank`. Constructing only assigns. `is_sealed`: as in `Peer`."""

    def __init__(self, orders: Orders, rank: int, *, is_sealed: bool = False) -> None:
        self._orders, self._rank, self._is_sealed = orders, rank, is_sealed
        self._known: dict[tuple[int, float], Peer] = {}
        self._failures: dict[int, tuple[int, float]] = {}
        self._asked: dict[int, None] = {}
        """Ranks to which a connection is open, the one that rests longest first."""

    def __len__(self) -> int:
        return len(self._orders.peers)

    def peer(self, rank: int, seconds: float = _SECONDS) -> Peer:
        """Where to ask that rank."""
        if (rank, seconds) not in self._known:
            seat, orders = self._orders.peers[rank], self._orders
            tls = client_context(orders.tls)
            self._known[rank, seconds] = Peer(
                seat.address,
                orders.secret,
                orders.run,
                timeout=seconds,
                tls=tls,
                tls_name=NAME,
                is_sealed=self._is_sealed,
            )
        return self._known[rank, seconds]

    def state(self, rank: int, id: CheckpointId) -> dict[str, Any] | None:
        """What a rank says about a checkpoint; None if it cannot be asked now."""
        return self._ask(rank, "state", id)

    def shards(self, rank: int, id: CheckpointId) -> dict[str, Any] | None:
        """What the node of a rank holds of a checkpoint; None if it cannot be asked now."""
        return self._ask(rank, "shards", id)

    def _ask(self, rank: int, question: str, id: CheckpointId) -> dict[str, Any] | None:
        failures, again_at = self._failures.get(rank, (0, 0.0))
        if again_at > time.monotonic():
            return None
        try:
            answer = self.peer(rank, _ASK_SECONDS).ask(question, id=id.directory, by=self._rank)
        except OSError:
            pause = _PAUSE_SECONDS[min(failures, len(_PAUSE_SECONDS) - 1)]
            self._failures[rank] = failures + 1, time.monotonic() + pause
            return None
        self._failures.pop(rank, None)
        self._rest(rank)
        return answer or None

    def _rest(self, rank: int) -> None:
        """Of the connections for questions only some stay open: there may be more ranks than descriptors."""
        self._asked.pop(rank, None)
        self._asked[rank] = None
        for other in list(self._asked)[:-_MOST_OPEN]:
            del self._asked[other]
            self.peer(other, _ASK_SECONDS).rest()

    def close(self) -> None:
        """Hang up."""
        for peer in self._known.values():
            peer.close()
