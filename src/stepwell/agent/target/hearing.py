"""What ranks tell one another of each checkpoint on the node level: who asks whom, and how often.

Owns:    asking them, and remembering what will not change.
Not:     what follows from it (keeper).
Holds:   a rank that holds its part, and has done its duties, is not asked again: a commit costs a question or two for
         each rank, however often the leader looks.
"""

from __future__ import annotations

from typing import Any, Final

from stepwell.agent.target.answers import Answers
from stepwell.agent.target.shared_target import MANY_RANKS
from stepwell.levels.assignments import Orders
from stepwell.levels.peers.connections import Peers
from stepwell.types import CheckpointId

State = dict[str, Any]
_MOST: Final = 8
"""Checkpoints of which something is remembered: the newest."""
_OTHERS_FIRST_SECONDS: Final = 10.0
"""The agent that asks for a node may be gone."""


class Hearing:
    """For the agent of `rank`. Constructing only assigns."""

    def __init__(self, answers: Answers, peers: Peers, orders: Orders, rank: int) -> None:
        self._answers, self._peers = answers, peers
        self._may_wait = len(orders.peers) > MANY_RANKS and orders.here(rank)[0] != rank
        self._final: dict[CheckpointId, dict[int, State]] = {}

    def ask(self, id: CheckpointId, world_size: int) -> dict[int, State]:
        """Rank 0: what is known of every rank; of none behind the first that cannot be asked now."""
        known = self._final.setdefault(id, {})
        self._final = {other: self._final[other] for other in sorted(self._final)[-_MOST:]}
        states = {0: self._answers.state(id)}
        for rank in range(1, world_size):
            state = known.get(rank) or self._peers.state(rank, id)
            if state is None:
                break  # without it there is nothing to decide: a node that hangs would be waited for rank by rank
            states[rank] = state
            if _is_final(state):
                known[rank] = state
        return states

    def is_anothers_turn(self, waited: float) -> bool:
        """Where there are many ranks one of each node asks: what it hears lies on the disk that they share."""
        return self._may_wait and waited < _OTHERS_FIRST_SECONDS


def _is_final(state: State) -> bool:
    is_over = bool(state["void"] or state["ended"])
    return not is_over and state["held"] is not None and (state["is_ready"] or state["failed"] is not None)
