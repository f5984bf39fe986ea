"""Streamed saves. The trainer waits for them, so the thread that hears it may write.

Not:     the file (target.chunks), what other ranks still write (worker).
Holds:   at most one at a time. One that fails is over: the trainer is told, and begins again.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell.agent.pending import Pending
from stepwell.agent.target.chunks import StreamedSave
from stepwell.agent.worker import Worker
from stepwell.errors import StepwellError
from stepwell.handover.message import ToTrainer
from stepwell.handover.protocol import ChunkDone, Released, StreamChunk, StreamEnd


class Streaming:
    """Of one agent. Constructing only assigns."""

    def __init__(self, worker: Worker, send: Callable[[ToTrainer], None]) -> None:
        self._worker = worker
        self._send = send
        self._save: StreamedSave | None = None

    def begin(self, pending: Pending) -> None:
        """The chunks of this snapshot come next."""
        self._save = save = StreamedSave(self._worker.persister, pending)
        self._try(save.open)

    def write(self, message: StreamChunk) -> None:
        """A chunk is there."""
        save = self._find(message.sequence)
        if save is not None and self._try(lambda: save.write(message.slot, message.nbytes)):
            self._send(ChunkDone(message.sequence))

    def end(self, message: StreamEnd) -> None:
        """All chunks are there: a checkpoint, or a part of one."""
        save = self._find(message.sequence)
        if save is None:
            return
        if message.suspects:
            save.pending.arena.set_suspects(save.pending.slot, message.suspects, message.first)
        if self._try(save.finish):
            self._save, pending = None, save.pending
            if save.is_committed:
                self._worker.after_commit(pending, 0.0)
                self._worker.outbox.append(Released(pending.sequence, is_over=True))
                return
            with self._worker.lock:
                self._worker.queue.items.append(pending)
            self._worker.note_written(pending)

    def drop(self, reason: str) -> None:
        """The rest never comes."""
        if self._save is not None:
            self._save.abort()
            with self._worker.lock:
                self._worker.give_up(self._save.pending, reason)
            self._save = None

    def _find(self, sequence: int) -> StreamedSave | None:
        """None: it failed, or our predecessor had it, and the trainer is told."""
        is_this = self._save is not None and self._save.pending.sequence == sequence
        return self._save if is_this else None

    def _try(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except (OSError, StepwellError) as error:
            assert self._save is not None
            pending = self._save.pending
            self.drop(str(error))
            self._worker.note_failure(pending, error, final=True)
            self._worker.outbox.append(Released(pending.sequence, is_over=True))
            return False
        return True
