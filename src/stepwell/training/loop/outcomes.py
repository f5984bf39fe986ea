"""What became of snapshots: the copier and the agent report it, the training thread acts on it.

Owns:    the futures behind save handles; where the run stands on disk and in memory; what is wanted for that reason.
Not:     taking snapshots (snapshot), writing them (agent).
Holds:   where the run stands is written by the thread that hears of it, one for each field. What the training thread
         decides by, it takes out of the mailbox itself (`collect`).
"""

from __future__ import annotations

from typing import Any, Protocol

from stepwell.errors import PersistError
from stepwell.events import journal
from stepwell.handover.message import Heard
from stepwell.handover.protocol import (
    BaseWanted,
    ChainOver,
    DeltaAppended,
    Durable,
    Flushed,
    Lost,
    Rebased,
    Released,
    Replaced,
    WriteFailed,
)
from stepwell.training.loop.mailbox import Again, Drifted, Mailbox, WantAgain
from stepwell.training.loop.overdue import Watch
from stepwell.training.loop.save_handle import Uploads
from stepwell.training.loop.schedule import Schedule
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.types import Status


class Neighbours(Protocol):
    """What other processes of the run have to know of this one. Any thread, and no wait."""

    def on_new_agent(self, pid: int) -> None:
        """Another agent serves this process now."""

    def on_unannounced(self, inflight: Inflight) -> None:
        """A snapshot is void, and no agent has heard of it."""

    def on_no_agent(self) -> None:
        """This rank has no agent any more."""


class Outcomes:
    """Of the snapshots of one run. `open` comes before the first of them."""

    def __init__(self, pace: Schedule, snapshotter: Snapshotter, log: journal.EventLog) -> None:
        self.watch = Watch(log)
        self.uploads = Uploads(pace.end, snapshotter.hold_still)
        self.mailbox = Mailbox()
        self._snapshotter = snapshotter
        self._neighbours: Neighbours | None = None
        self.lineage = 0
        self.committed_step: int | None = None
        self.memory_step: int | None = None
        self.shared_step: int | None = None
        self.delta_step: int | None = None
        self.degraded: str | None = None
        """Why the newest checkpoint could not be protected on other nodes."""
        self.is_fenced = False
        self.why_lost: str | None = None
        """An agent, this rank's or another's, died again and again at the end of the run: nothing more is committed."""
        self.again: set[Again] = set()
        """Why a checkpoint is wanted, whatever the policy says. The training thread's, as is the next one."""
        self.has_drifted = False

    @property
    def is_lost(self) -> bool:
        """Whether there is nobody who would write a snapshot."""
        return self.why_lost is not None

    def open(self, lineage: int, neighbours: Neighbours) -> None:
        """The run is ours."""
        self.lineage, self._neighbours = lineage, neighbours

    def begin(self, step: int, *, is_lossy: bool) -> None:
        """The run resumed from this step. A lossy state is no checkpoint: the next step is to be one."""
        self.committed_step = None if is_lossy else step
        if is_lossy:
            self.again.add(Again.LOSSY)

    def collect(self) -> None:
        """Take what other threads posted. The training thread only."""
        for notice in self.mailbox.take():
            if isinstance(notice, WantAgain):
                self.again.add(notice.reason)
            else:
                self.has_drifted = True

    def status(self, **facts: Any) -> Status:
        """Where the run stands, with what the caller knows."""
        since, why = self.watch.late or (None, None)
        return Status(
            overdue_since=since,
            overdue_because=why,
            committed_step=self.committed_step,
            memory_step=self.memory_step,
            pending=len(self.uploads.pending()),
            is_fenced=self.is_fenced,
            degraded=self.degraded,
            shared_step=self.shared_step,
            delta_step=self.delta_step,
            **facts,
        )

    def ask_for_base(self) -> bool:
        """Any thread: there are no records until the next one. False: it may be on its way."""
        is_asked = not self.uploads.is_busy()
        if is_asked:
            self.mailbox.post(WantAgain(Again.BASE))
        return is_asked

    def on_settled(self, inflight: Inflight) -> None:
        """Copier thread: a snapshot is complete, or void."""
        if inflight.void is None:
            self.memory_step = self.memory_step if inflight.is_symbols else inflight.step
        elif inflight.is_durable:
            if not inflight.is_announced and self._neighbours is not None:
                self._neighbours.on_unannounced(inflight)
            reason = f"snapshot of step {inflight.step} is void: {inflight.void.leaf} ({inflight.void.seen_by})"
            self.watch.note_reason(reason)
            self.uploads.fail(inflight.sequence, PersistError(reason, step=inflight.step))
            self.mailbox.post(WantAgain(Again.VOID))

    def on_rank_lost(self, rank: int) -> None:
        """The line's thread: nobody is to wait for parts that may never come. What is whole is committed anyway."""
        self.uploads.fail_all(PersistError(f"rank {rank} is gone, so all ranks must restart", rank=rank))

    def on_no_agent(self, rank: int) -> None:
        """The line's thread: without the parts of that rank there are no checkpoints."""
        self.why_lost = f"the agent of rank {rank} keeps dying; see the log of that rank"
        self.uploads.fail_all(PersistError(self.why_lost, rank=rank))

    def on_agent(self, message: Heard) -> None:
        """Listening thread: the agent tells what became of a snapshot."""
        assert self._neighbours is not None
        match message:
            case Durable(sequence, step, directory):
                self.committed_step, self.degraded = step, message.degraded
                self.watch.note_committed(step)
                self.uploads.succeed(sequence, directory)
            case Released(sequence):
                self._snapshotter.pool.release(sequence)
                if message.is_over:
                    self.uploads.forget(sequence)
            case WriteFailed():
                self._on_failed(message)
            case Flushed(step):
                self.shared_step = step
            case BaseWanted():
                # One that is streamed is never in memory, and cannot be the base of a chain.
                if not self._snapshotter.pool.is_streaming:
                    self.mailbox.post(WantAgain(Again.BASE))
            case DeltaAppended() | Rebased() | ChainOver():
                self._on_chain(message)
            case Replaced(pid):
                if self._snapshotter.symbols is not None:
                    self._snapshotter.symbols.on_over()  # the chain went with the agent before
                self._neighbours.on_new_agent(pid)
            case Lost():
                self.why_lost = "the agent keeps dying; see its error in the log above"
                self.watch.note_reason(self.why_lost)
                self._snapshotter.pool.release_all()
                self.uploads.fail_all(PersistError(self.why_lost))
                self._neighbours.on_no_agent()
        if self._snapshotter.pool.is_streaming:
            self._snapshotter.answers.put(message)  # the training thread waits for it

    def _on_failed(self, message: WriteFailed) -> None:
        """A snapshot could not be written; it may be tried again."""
        self.watch.note_reason(message.error)
        if message.fenced and message.lineage == self.lineage:
            self.is_fenced = True
        if message.void:
            self.mailbox.post(WantAgain(Again.VOID))
        if message.drift:
            self.mailbox.post(Drifted())
        if message.final:
            self.uploads.fail(message.sequence, PersistError(message.error, step=message.step))

    def _on_chain(self, message: DeltaAppended | Rebased | ChainOver) -> None:
        """A chain has begun, has a record more, or is over."""
        symbols = self._snapshotter.symbols
        if isinstance(message, DeltaAppended):
            self.delta_step = message.step
        if symbols is None:
            return
        match message:
            case DeltaAppended():
                symbols.on_appended()
            case Rebased(sequence, base):
                symbols.on_rebased(sequence, base)
            case ChainOver(base):
                symbols.on_over(base)
