"""The agents of the other ranks, each asked over a connection that is made when it is needed.

Holds:   who cannot be asked says nothing, and is not asked again for a moment, which grows: a node that hangs costs
         those who ask it a few seconds now and then.
"""

from __future__ import annotations

import time
from typing import Any, Final

from stepwell.levels.fetch import Peer
from stepwell.levels.orders import Orders
from stepwell.levels.tls import NAME, client_context
from stepwell.types import CheckpointId

_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Peers:
    """Of one run. Constructing only assigns."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._known: dict[tuple[int, float], Peer] = {}
        self._failures: dict[int, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._orders.peers)

    def peer(self, rank: int, seconds: float = _SECONDS) -> Peer:
        """Where to ask that rank."""
        if (rank, seconds) not in self._known:
            seat, orders = self._orders.peers[rank], self._orders
            tls = client_context(orders.tls)
            self._known[rank, seconds] = Peer(
                seat.address, orders.secret, orders.run, timeout=seconds, tls=tls, tls_name=NAME
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
            answer = self.peer(rank, _ASK_SECONDS).ask(question, id=id.directory)
        except OSError:
            pause = _PAUSE_SECONDS[min(failures, len(_PAUSE_SECONDS) - 1)]
            self._failures[rank] = failures + 1, time.monotonic() + pause
            return None
        self._failures.pop(rank, None)
        return answer or None

    def close(self) -> None:
        """Hang up."""
        for peer in self._known.values():
            peer.close()
