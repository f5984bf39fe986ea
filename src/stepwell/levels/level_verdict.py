"""Rank 0's verdict on a checkpoint, from what all ranks said about it. Pure.

A state is what `agent.keeper` answers: whether the rank holds its part, gave up, and has done its duties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stepwell.errors import VoidError
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.format.summary import Summary
from stepwell.storage.store import assemble
from stepwell.types import CheckpointId, Owner, SaveRequest

_AWAY: Final = "the cache of its node cannot be written: its part is in the shared place"
States = Mapping[int, Mapping[str, Any]]
"""By rank, of those that could be asked."""


def missing(states: States, world_size: int) -> list[int]:
    """Ranks that do not hold their part yet, or cannot be asked. Raises VoidError if one gave up."""
    for rank, state in states.items():
        if state["void"] or state["ended"]:
            raise VoidError(state["void"] or state["ended"], rank=rank)
    return [rank for rank in range(world_size) if rank not in states or states[rank]["held"] is None]


def check_copies(states: States) -> None:
    """What several ranks hold copies of has to be the same on all of them. Raises VoidError."""
    assemble.check_copies({rank: state["held"]["copies"] for rank, state in states.items()})


def unready(states: States) -> list[int]:
    """Ranks that still have something to do for others."""
    return [rank for rank, state in states.items() if not state["is_ready"] and state["failed"] is None]


def degraded(states: States) -> dict[str, str]:
    """Ranks that could not do what they had to do for others, or for whom nobody does it, and why."""
    failed = {rank: state["failed"] or "not done in time" for rank, state in states.items() if not state["is_ready"]}
    alone = {rank: state["unprotected"] for rank, state in states.items() if state["unprotected"]}
    away = {rank: _AWAY for rank, state in states.items() if state["held"] and state["held"].get("is_shared")}
    return {str(rank): reason for rank, reason in sorted((alone | failed | away).items())}


def summaries(run: str, id: CheckpointId, created: float, states: States) -> list[Summary]:
    """All ranks hold their parts: their records, summed up."""
    held = [states[rank]["held"] for rank in sorted(states)]
    return [
        Summary(
            run=run,
            id=id,
            owner=Owner(rank, len(held)),
            created=created,
            nbytes=item["nbytes"],
            digest=item["digest"],
            data_bytes=item["data_bytes"],
            suspect=item["suspect"],
            copies=item.get("copies", {}),
        )
        for rank, item in enumerate(held)
    ]


def make_manifest(run: str, id: CheckpointId, request: SaveRequest, states: States) -> Manifest:
    """All ranks hold their parts. `request`: as the trainer said when it began."""
    parts = summaries(run, id, request.created, states)
    facts = {"epoch_end": request.epoch_end, "finished": request.finished, "name": request.name}
    return assemble.make_manifest(parts, **facts)
