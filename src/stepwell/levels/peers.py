"""The agents of the other ranks, each asked over a connection that is made when it is needed.

Holds:   who cannot be asked says nothing, and is not asked again for a moment, or as long as it has kept us waiting:
         the thread that asks has other things to do.
"""

from __future__ import annotations

import time
from typing import Any, Final

from stepwell.levels.fetch import Peer
from stepwell.levels.orders import Orders
from stepwell.types import CheckpointId

_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.5


class Peers:
    """Of one run. Constructing only assigns."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._known: dict[int, Peer] = {}
        self._not_before: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._orders.peers)

    def peer(self, rank: int) -> Peer:
        """Where to ask that rank."""
        if rank not in self._known:
            seat = self._orders.peers[rank]
            self._known[rank] = Peer(seat.address, self._orders.secret, self._orders.run, timeout=_SECONDS)
        return self._known[rank]

    def state(self, rank: int, id: CheckpointId) -> dict[str, Any] | None:
        """What a rank says about a checkpoint; None if it cannot be asked now."""
        return self._ask(rank, "state", id)

    def shards(self, rank: int, id: CheckpointId) -> dict[str, Any] | None:
        """What the node of a rank holds of a checkpoint; None if it cannot be asked now."""
        return self._ask(rank, "shards", id)

    def _ask(self, rank: int, question: str, id: CheckpointId) -> dict[str, Any] | None:
        if self._not_before.get(rank, 0.0) > time.monotonic():
            return None
        began = time.monotonic()
        try:
            return self.peer(rank).ask(question, id=id.directory) or None
        except OSError:
            now = time.monotonic()
            self._not_before[rank] = now + max(_PAUSE_SECONDS, now - began)
            return None

    def close(self) -> None:
        """Hang up."""
        for peer in self._known.values():
            peer.close()
