"""The thread that persists: takes the next snapshot from the queue, writes it, reports, prunes; and looks after those
whose other parts other ranks still write.

Owns:    the queue, the lock around it, and what the trainer is to be told.
Not:     the sockets, and when the process ends (process).
Holds:   one snapshot at a time; a failing disk means another try; one that came to nothing is not a failure.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepwell.agent.files.writer import Writer
from stepwell.agent.pending import AbandonedError, Pending, Stage
from stepwell.agent.queue import PendingQueue
from stepwell.agent.target.shared_target import Persister
from stepwell.errors import FencedError, StateError, StepwellError, VoidError
from stepwell.events import journal, run_events
from stepwell.handover.message import ToTrainer
from stepwell.handover.protocol import Durable, Flushed, GivesUp, NoPart, Released, Voided, WriteFailed
from stepwell.storage.format.manifest import Void
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress
from stepwell.types import CheckpointId, Keep, Owner

if TYPE_CHECKING:
    from stepwell.agent.chainer import Chainer
    from stepwell.agent.target.flush import Flusher

_RETRY_SECONDS: Final = (0.5, 1, 2, 5, 10, 30)
_SYMBOLS_SECONDS: Final = 10.0


@dataclass(frozen=True)
class _Word:
    """What the leader has yet to be told, when, and how often that failed."""

    void: Void
    not_before: float = 0.0
    failures: int = 0


class Worker:
    """Constructing only assigns; `start` makes the thread appear. All but `lock` and `start` is used under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.queue = PendingQueue()
        self.busy: Pending | None = None
        self.outbox: list[ToTrainer] = []
        self.lineage = 0
        self.keep = Keep()
        self.log = journal.EventLog(Path(os.devnull), who="agent")
        self._writer = Writer()
        self.persister = Persister(RunPaths(Path()), self.log, self._writer, lineage=0)
        self.flusher: Flusher | None = None
        self.chainer: Chainer | None = None
        self.storage_seconds = 120.0
        self._again: CheckpointId | None = None
        self._again_at = self._again_pause = 0.0
        self._is_leader = True
        self._sweeps_due = 0
        self._voids: list[_Word] = []

    def serve(
        self, paths: RunPaths, owner: Owner, lineage: int, keep: Keep, patience: float,
        levels: dict[str, Any] | None = None, deltas: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """A trainer said hello: this is its run.

        levels:  its checkpoints go to this node first
        deltas:  what changes between them goes into chains
        """
        self.lineage, self.keep = lineage, keep
        self.log.close()
        self.log = journal.EventLog(
            paths.events, who="agent", lineage=lineage, rank=paths.rank, background=levels is not None
        )
        self.persister = Persister(paths, self.log, self._writer, lineage=lineage, patience=patience)
        if self.flusher is not None:
            self.flusher.close()
        self.flusher = None
        if levels is not None:  # most agents never need these modules, and all have to start fast
            from stepwell.agent.target.flush import Flusher
            from stepwell.agent.target.marker import Marker
            from stepwell.agent.target.node_target import NodeTarget
            from stepwell.agent.target.spill import Spill
            from stepwell.levels.assignments import Orders

            orders = Orders.load(levels)
            spill = Spill(paths, owner, keep, self.log, lineage=lineage, patience=patience)
            keeper = NodeTarget(orders, owner, self.log, self._writer, spill, lineage=lineage, patience=patience)
            rate = orders.shared.rate
            marker = Marker(paths, orders.run, orders.place, self.log) if owner.is_leader else None
            self.flusher = flusher = Flusher(self.persister, keeper.paths, owner, keep, rate, lineage, marker)
            keeper.on_whole, keeper.may_flush = flusher.add, lambda: flusher.has_room
            keeper.on_newest, flusher.read_manifest = flusher.note_whole, keeper.decisions.read_manifest
            flusher.on_flushed = spill.on_committed = self._note_flushed
            self.persister = keeper
            self._again, self._again_at, self._again_pause = CheckpointId.parse(orders.again), 0.0, 0.1
            flusher.start()
        self._is_leader = owner.is_leader
        self._sweeps_due += self.persister.may_prune
        if self.chainer is not None:
            self.chainer.close()
        self.chainer = None
        if deltas is not None:
            from stepwell.agent.chainer import Chainer
            from stepwell.storage.chain.chain_request import load

            self.chainer = Chainer(
                load(deltas), paths, self.log, lineage, lock=self.lock, queue=self.queue, say=self._say
            )
            self.chainer.start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done and nothing waits to be done."""
        is_done = self.busy is None and not self._sweeps_due and not self._voids and not self.queue.is_waiting()
        is_done = is_done and (self._again is None or self._again_at > 0)  # it may have to be carried on
        is_done = is_done and (self.chainer is None or not (self.chainer.is_busy or self.queue.has_symbols()))
        return is_done and (self.flusher is None or self.flusher.is_idle)

    def may_leave(self, late_seconds: float) -> bool:
        """Whether the process may end so long after its time. Not while something moves on to the shared place.

        A place that fails is given as long as at any end of a run: nobody would ever end an agent that waits for it.
        """
        flusher = self.flusher
        is_busy = self.busy is not None or (self.chainer is not None and self.chainer.is_busy)
        if is_busy or flusher is None or flusher.is_idle:
            return not is_busy
        return not flusher.is_moving and late_seconds > self.storage_seconds

    def hurry(self) -> None:
        """The run ends."""
        if self.flusher is not None:
            self.flusher.hurry()

    def note_taken(self, sequence: int) -> None:
        """The trainer has read a base out of its slot."""
        with self.lock:
            if self.chainer is not None:
                self.chainer.let_go(sequence)

    def make_room(self) -> None:
        """A snapshot that is to be written has no slot."""
        with self.lock:
            self.queue.is_room_wanted = True
            if self.chainer is not None:
                self.chainer.make_room()

    def wait_symbols(self) -> None:
        """Until what came coded is in its chain: who goes on from there reads it."""
        with self.lock:
            chainer, deadline = self.chainer, time.monotonic() + _SYMBOLS_SECONDS
            while chainer is not None and (self.queue.has_symbols() or chainer.is_busy) and time.monotonic() < deadline:
                self.lock.wait(0.02)

    def tell_death(self, progress_file: Path, pid: int, pending: int) -> None:
        """Of the trainer. A thread of its own: the file system may hang."""
        progress = read_progress(progress_file)
        step = progress.step if progress is not None and progress.pid == pid else 0
        self.log.emit(run_events.TrainerDeath(pid=pid, step=step, pending=pending))

    def start(self) -> None:
        """Begin to work."""
        threading.Thread(target=self._work, daemon=True, name="stepwell-persist").start()

    def _work(self) -> None:
        try:
            self._work_on()
        except BaseException:  # a thread that ends quietly would leave an agent that never writes again
            traceback.print_exc()
            os._exit(1)  # the trainer starts another one

    def _work_on(self) -> None:
        while True:
            with self.lock:
                self.busy = None
                os.eventfd_write(self.wake, 1)
                while (job := self._next_job()) is None:
                    self.lock.wait(min([0.2, *(self.persister.shelf.looks[1] / 20 for _ in self.queue.written())]))
            job()

    def _next_job(self) -> Callable[[], None] | None:
        """What is to be done now; `busy` is the snapshot it is about."""
        now = time.monotonic()
        for word in self._voids:
            if word.not_before <= now:
                return lambda: self._void(word)
        written = self.queue.written()
        if any(item.not_before <= now for item in written):
            self.busy = written[0]
            return lambda: self._follow(written)
        pending = self.queue.next_due(now)
        if pending is not None:
            self.busy = pending
            return lambda: self._persist(pending)
        if self._again is not None and self._again_at <= now:
            return self._rehold
        return self._sweep if self._sweeps_due else None

    def _say(self, message: ToTrainer) -> None:
        """Under the lock."""
        self.outbox.append(message)
        os.eventfd_write(self.wake, 1)

    def _sweep(self) -> None:
        sweeps = self._sweeps_due
        with contextlib.suppress(OSError, StepwellError):  # the same again after the next commit
            self.persister.sweep(self.lineage)
        with self.lock:
            self._sweeps_due -= sweeps

    def _rehold(self) -> None:
        """After a restart: hold and protect again what all went on from, beside everything else."""
        from stepwell.agent.target.node_target import NodeTarget

        keeper, id = self.persister, self._again
        assert isinstance(keeper, NodeTarget) and id is not None
        is_over = False
        with contextlib.suppress(OSError, StepwellError):  # again in a moment, or the next checkpoint does
            is_over = keeper.rehold(id)
        is_over = is_over or keeper.has_newer(id)
        with self.lock:
            self._again_pause = min(10.0, 1.5 * self._again_pause)
            self._again, self._again_at = (None if is_over else id), time.monotonic() + self._again_pause

    def _persist(self, pending: Pending) -> None:
        started = time.monotonic()
        try:
            is_committed = self.persister.persist(pending)
        except AbandonedError:
            pass  # void, or its trainer died before it was complete: the queue lets go of it
        except (OSError, StepwellError) as error:
            # A record that is too large would be so again, after all shards were written again.
            is_refused = isinstance(error, StateError)
            if is_refused:
                with self.lock:
                    self.give_up(pending, str(error))
            self.note_failure(pending, error, final=is_refused or isinstance(error, (FencedError, VoidError)))
        else:
            if is_committed:
                chainer = None if pending.is_delta else self.chainer
                pending.is_held = pending.is_held or chainer is not None
                self.after_commit(pending, time.monotonic() - started)
                if chainer is not None:
                    chainer.rebase(pending)
            else:
                self.note_written(pending)

    def note_written(self, pending: Pending) -> None:
        """This rank's part is durable: its slot is free. What becomes of the checkpoint depends on the others."""
        with self.lock:
            pending.written_at = pending.not_before = time.monotonic()
            self.outbox.append(Released(pending.sequence, is_over=False))
        os.eventfd_write(self.wake, 1)

    def _follow(self, written: Sequence[Pending]) -> None:
        """Look whether the other ranks have written their parts.

        The leader ends them in order: a commit removes what is older, and with it what other ranks say of that. Those
        of a trainer before hold nothing up: its ranks may have died a step apart, and have written different ones.
        """
        now = time.monotonic()
        for item in written:
            item.not_before = now + self.persister.pause(item.owner.world_size, self._waited(item))
        for item in written:
            with self.lock:
                self.busy = item
            self._look(item)
            if self._is_leader and not item.is_over and item.id.lineage == self.lineage:
                return

    def _waited(self, pending: Pending) -> float:
        assert pending.written_at is not None
        return time.monotonic() - pending.written_at

    def _look(self, pending: Pending) -> None:
        waited = self._waited(pending)
        try:
            is_committed = self.persister.follow(pending)
        except (OSError, StepwellError) as error:
            # The next ones wait for this one: a directory that cannot be read must not hold them for ever.
            is_late = waited > 2 * self.persister.patience
            if is_late or isinstance(error, (FencedError, VoidError)):
                self.note_failure(pending, error, final=True)
            else:
                run_events.logger.debug("cannot check %s: %s", pending.id, error)  # and again soon
        else:
            if is_committed:
                self.after_commit(pending, waited)

    def give_up(self, pending: Pending, reason: str) -> None:
        """This rank has no part in a checkpoint: nobody is to wait for it. Under the lock."""
        if not pending.owner.is_alone and pending.is_wanted:
            self.say_void(Void(pending.run, pending.id, pending.owner.rank, reason))
            # Should this process die before that is done, its trainer says it to the next one.
            self.outbox.append(GivesUp(NoPart(pending.id.step, pending.id.repeat, reason)))

    def say_void(self, void: Void) -> None:
        """The trainer could not even begin. Under the lock."""
        self._voids.append(_Word(void))
        self.lock.notify_all()

    def _void(self, word: _Word) -> None:
        again = None
        try:
            self.persister.void(word.void)
        except (OSError, StepwellError) as error:  # a disk without room for the bytes may have none for this either
            if not isinstance(error, FencedError):
                delay = _RETRY_SECONDS[min(word.failures, len(_RETRY_SECONDS) - 1)]
                again = _Word(word.void, time.monotonic() + delay, word.failures + 1)
            if not word.failures:
                action = "the other ranks wait for it" if again else "given up"
                self.log.emit(run_events.PersistFailed(step=word.void.id.step, error=str(error), action=action))
        with self.lock:
            self._voids = [other for other in self._voids if other is not word] + ([again] if again else [])
            if again is None:
                self.outbox.append(Voided(word.void.id.step, word.void.id.repeat))
        os.eventfd_write(self.wake, 1)

    def after_commit(self, pending: Pending, seconds: float) -> None:
        """Tell the trainer, then make room on disk."""
        with self.lock:
            pending.ended, degraded = Stage.COMMITTED, self.persister.why_degraded(pending.id)
            about = pending.sequence, pending.id.step, pending.id.directory
            self.outbox.append(Durable(*about, seconds, degraded))
        os.eventfd_write(self.wake, 1)
        is_clean = not self.persister.may_prune
        with contextlib.suppress(OSError, StepwellError):  # told by its own event; there is always a next time
            is_clean = is_clean or self.persister.prune(self.lineage, self.keep)
        if not is_clean:
            with self.lock:
                self._sweeps_due += 1  # this may have been the last checkpoint: what is left of an old one goes soon
        with contextlib.suppress(OSError, StepwellError):  # found out again by the next agent
            self.persister.remember()

    def _note_flushed(self, id: CheckpointId) -> None:
        """The flusher's thread: a checkpoint is in the shared place."""
        with self.lock:
            self.outbox.append(Flushed(id.step))
        os.eventfd_write(self.wake, 1)

    def note_failure(self, pending: Pending, error: Exception, *, final: bool) -> None:
        """Say what went wrong and when it is tried again."""
        if isinstance(error, FencedError):
            self.log.emit(run_events.Fenced(lineage=pending.id.lineage, newest=int(str(error.fields["newest"]))))
        delay = _RETRY_SECONDS[min(pending.failures, len(_RETRY_SECONDS) - 1)]
        action = "given up" if final else f"retrying in {delay} s, or with the next snapshot"
        self.log.emit(run_events.PersistFailed(step=pending.id.step, error=str(error), action=action))
        with self.lock:
            pending.failures += 1
            pending.not_before = time.monotonic() + delay
            pending.ended = Stage.GIVEN_UP if final else pending.ended
            if self.chainer is not None:
                self.chainer.make_room()
            is_void, is_fenced = isinstance(error, VoidError), isinstance(error, FencedError)
            has_drifted = isinstance(error, VoidError) and bool(error.fields.get("is_drift"))
            about = pending.sequence, pending.id.step, pending.id.lineage, str(error)
            self.outbox.append(WriteFailed(*about, final, fenced=is_fenced, void=is_void, drift=has_drifted))
        os.eventfd_write(self.wake, 1)
