"""A blocking save through two small chunks, for hosts without room for a whole snapshot.

The training thread fills one chunk while the agent writes the other. Nothing is kept in memory afterwards.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from stepwell.events import journal, run_events
from stepwell.handover.client import AgentClient
from stepwell.handover.memory import Arena
from stepwell.handover.message import Heard
from stepwell.handover.protocol import (
    Begin,
    ChunkDone,
    Durable,
    Lost,
    OfSnapshot,
    Released,
    Replaced,
    StreamBegin,
    StreamChunk,
    StreamEnd,
    WriteFailed,
)
from stepwell.training.snapshot.guard import Copies, digests
from stepwell.training.snapshot.host_copy import has_non_finite
from stepwell.training.snapshot.inflight import Inflight, VoidReason
from stepwell.training.snapshot.layout import Plan
from stepwell.training.state.flatten import Flat
from stepwell.types import SaveRequest

_ANSWER_SECONDS = 120.0
_TRIES = 3
_ABOUT_ALL = (Replaced, Lost)
"""Of the words without a number those that end a save; others are about flushes and chains."""


class StreamAnswers:
    """What the agent says while a save is streamed, handed from the listening thread to the saving one."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Heard] = queue.SimpleQueue()

    def put(self, message: Heard) -> None:
        """The agent (or its client: `Replaced`, `Lost`) said something."""
        self._messages.put(message)

    def clear(self) -> None:
        """Forget what was said about earlier saves."""
        while not self._messages.empty():
            self._messages.get_nowait()

    def wait(self, sequence: int) -> Heard | None:
        """Block for the next word about this save; None if none comes."""
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            is_of_this = isinstance(message, OfSnapshot) and message.sequence == sequence
            if is_of_this or isinstance(message, _ABOUT_ALL):
                return message


def stream_image(
    client: AgentClient,
    arena: Arena,
    flat: Flat,
    plan: Plan,
    request: SaveRequest,
    *,
    number: Callable[[], int],
    log: journal.EventLog,
    answers: StreamAnswers,
) -> Inflight:
    """Save through the agent, chunk by chunk. Returns when it is committed (of many ranks: this one's part durable) or
    failed; void if no agent took it.

    Training stands still, so an agent that dies meanwhile only means to begin again.
    """
    inflight = Inflight(
        step=request.step,
        sequence=0,
        slot=0,
        arena=arena,
        plan=plan,
        strategy="streamed",
        repeat=request.repeat,
    )
    outcome: Heard | None = None
    for _ in range(_TRIES):
        inflight.sequence = number()
        answers.clear()
        outcome = _send(client, arena, flat, plan, request, inflight, answers)
        if not isinstance(outcome, Replaced):
            break
    inflight.stall_seconds = time.monotonic() - inflight.started
    inflight.done.set()
    if not isinstance(outcome, (Durable, Released, WriteFailed)):
        inflight.void = VoidReason("?", "the agent died or fell silent while it was streamed")
        log.emit(run_events.PersistFailed(step=inflight.step, error=inflight.void.seen_by, action="trying again soon"))
    elif not isinstance(outcome, WriteFailed):
        log.emit(
            run_events.Snapshot(
                step=inflight.step,
                sequence=inflight.sequence,
                strategy="streamed",
                nbytes=plan.live.nbytes,
                stall_seconds=inflight.stall_seconds,
                copy_seconds=inflight.stall_seconds,
            )
        )
    inflight.staged.set_result(None)
    return inflight


def _send(
    client: AgentClient,
    arena: Arena,
    flat: Flat,
    plan: Plan,
    request: SaveRequest,
    inflight: Inflight,
    answers: StreamAnswers,
) -> Heard | None:
    """One try. Returns the last word about it (`Released`: other ranks still write); None if there was none."""
    sequence, shape = inflight.sequence, arena.shape
    arena.claim(0)
    begin = Begin(request, sequence, slot=0, generation=shape.generation, layout=plan.number, frozen=0)
    client.send(StreamBegin(**{**vars(begin), "copies": digests(Copies().take(flat))}))
    starts = range(0, plan.live.nbytes, shape.slot_bytes)
    for number, start in enumerate(starts):
        if number >= shape.slots and not isinstance(word := answers.wait(sequence), ChunkDone):
            return word
        slot, end = number % shape.slots, min(start + shape.slot_bytes, plan.live.nbytes)
        _fill(arena.image(slot, end - start), start, end, flat, plan)
        client.send(StreamChunk(sequence, slot, end - start))
    for _ in range(min(len(starts), shape.slots)):
        if not isinstance(word := answers.wait(sequence), ChunkDone):
            return word
    inflight.suspects = _suspects(flat, plan)
    first = plan.places[inflight.suspects[0]].index if inflight.suspects else 0
    client.send(StreamEnd(sequence, len(inflight.suspects), first))
    word = answers.wait(sequence)
    if isinstance(word, Released):
        client.note_written(begin)
    return word


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
    return [leaf.name for leaf in flat.leaves if leaf.name in plan.checked and has_non_finite(leaf.tensor)]
