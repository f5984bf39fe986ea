"""A blocking save through two small chunks, for hosts without room for a whole snapshot.

The training thread fills one chunk while the agent writes the other. Nothing is kept in memory afterwards.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import torch

from stepwell import events
from stepwell.agent.client import AgentClient
from stepwell.arena.memory import Arena
from stepwell.errors import AgentError
from stepwell.format import dtypes
from stepwell.snapshot.guard import Fingerprints, Guard
from stepwell.snapshot.inflight import Inflight, has_non_finite
from stepwell.snapshot.plan import Plan
from stepwell.state.flatten import Flat

_ANSWER_SECONDS = 120.0


class ChunkAcks:
    """Answers of the agent to chunks, handed from the listening thread to the saving one."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self) -> None:
        """The agent wrote a chunk (or gave up on it)."""
        self._answers.put(None)

    def clear(self) -> None:
        """Forget answers of an earlier save."""
        while not self._answers.empty():
            self._answers.get()

    def wait(self) -> None:
        """Block until the agent wrote one more chunk. Raises AgentError if it does not answer."""
        try:
            self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise AgentError(f"the agent did not write a chunk within {_ANSWER_SECONDS:.0f} s") from None


def stream_image(
    client: AgentClient,
    arena: Arena,
    flat: Flat,
    plan: Plan,
    meta: dict[str, Any],
    *,
    sequence: int,
    log: events.EventLog,
    acks: ChunkAcks,
) -> Inflight:
    """Send the whole image. Returns when the agent has every byte; the commit follows asynchronously."""
    inflight = Inflight(
        step=meta["step"],
        sequence=sequence,
        slot=0,
        arena=arena,
        strategy="streamed",
        nbytes=plan.live.nbytes,
        frozen_sequence=0,
        copies_frozen=False,
        guard=Guard(),
        fingerprints=Fingerprints(),
        names={},
        targets={},
        checked=[],
    )
    arena.claim(0)
    message = {"type": "stream", **meta, "sequence": sequence, "slot": 0, "layout": plan.number, "frozen": 0}
    client.send({**message, "generation": arena.shape.generation})
    acks.clear()
    chunk, outstanding = arena.shape.slot_bytes, 0
    for number, start in enumerate(range(0, plan.live.nbytes, chunk)):
        if outstanding == arena.shape.slots:
            acks.wait()
            outstanding -= 1
        slot, end = number % arena.shape.slots, min(start + chunk, plan.live.nbytes)
        _fill(arena.image(slot, end - start), start, end, flat, plan)
        client.send({"type": "chunk", "sequence": sequence, "slot": slot, "nbytes": end - start})
        outstanding += 1
    for _ in range(outstanding):
        acks.wait()
    inflight.suspects = _suspects(flat, plan)
    first = plan.places[inflight.suspects[0]].index if inflight.suspects else 0
    client.send({"type": "stream_end", "sequence": sequence, "suspects": len(inflight.suspects), "first": first})
    inflight.stall_seconds = time.monotonic() - inflight.started
    inflight.done.set()
    inflight.staged.set_result(None)
    waited = inflight.stall_seconds
    log.emit(
        events.Snapshot(
            step=inflight.step,
            sequence=sequence,
            strategy="streamed",
            nbytes=plan.live.nbytes,
            stall_seconds=waited,
            copy_seconds=waited,
        )
    )
    return inflight


def _fill(target: memoryview, start: int, end: int, flat: Flat, plan: Plan) -> None:
    """Bytes [start, end) of the image."""
    header = plan.live.header
    if start < len(header):
        part = header[start:end]
        target[: len(part)] = part
    chunk = torch.frombuffer(target, dtype=torch.uint8)
    for leaf in flat.leaves:
        place = plan.places[leaf.name]
        low, high = max(start, place.start), min(end, place.start + place.nbytes)
        if low < high:
            data = leaf.tensor.contiguous().reshape(-1).view(torch.uint8)
            chunk[low - start : high - start].copy_(data[low - place.start : high - place.start])


def _suspects(flat: Flat, plan: Plan) -> list[str]:
    checked = {entry.name for entry in plan.entries if entry.role in ("parameter", "moment1", "moment2", "optimizer")}
    return [
        leaf.name
        for leaf in flat.leaves
        if leaf.name in checked and leaf.dtype in dtypes.FLOATING and has_non_finite(leaf.tensor)
    ]
