"""What became of snapshots: told by the copier and by the agent, asked by the training thread.

Owns:    the futures behind save handles, and where the run stands on disk and in memory.
Not:     taking snapshots (snapshot), writing them (agent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepwell.errors import PersistError
from stepwell.events import journal
from stepwell.handover.channel import Message
from stepwell.training.loop.overdue import Watch
from stepwell.training.loop.save_handle import Uploads
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.types import Status


class Outcomes:
    """Written by the copier and listening threads. `attach` comes before the first of them."""

    def __init__(
        self, on_decided: Callable[[int, bool], None], on_new_agent: Callable[[int], None], log: journal.EventLog
    ) -> None:
        self.watch = Watch(log)
        self.uploads = Uploads(on_decided, self._hold_still)
        self._on_new_agent = on_new_agent
        self.on_unheard: Callable[[Inflight], None] = lambda inflight: None
        """Told of a snapshot that came to nothing before an agent heard of it."""
        self._snapshotter: Snapshotter | None = None
        self.lineage = 0
        self.committed_step: int | None = None
        self.memory_step: int | None = None
        self.shared_step: int | None = None
        self.delta_step: int | None = None
        self.degraded: str | None = None
        """Why the newest checkpoint could not be protected on other nodes."""
        self.is_fenced = False
        self.on_lost: Callable[[], None] = lambda: None
        self.why_lost: str | None = None
        """An agent, this rank's or another's, died again and again at the end of the run: nothing more is committed."""
        self.is_due_again = False
        """A checkpoint is wanted, whatever the policy says: the last snapshot was void, and the next one is taken
        blocking; or a chain needs a base; or the run went on from a lossy state.
        """
        self.has_drifted = False
        """What the ranks share is not the same on all of them any more: they have to look again."""

    @property
    def is_lost(self) -> bool:
        """Whether there is nobody who would write a snapshot."""
        return self.why_lost is not None

    def begin(self, step: int, *, is_lossy: bool) -> None:
        """Went on from this step. What is lossy is no checkpoint: the next step is to be one."""
        self.committed_step, self.is_due_again = None if is_lossy else step, is_lossy

    def want_again(self, is_wanted: bool) -> None:
        """Any thread. It is only ever set here: who reads and writes it back would lose what another thread says."""
        if is_wanted:
            self.is_due_again = True

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

    def attach(self, snapshotter: Snapshotter) -> None:
        """Where slots are given back."""
        self._snapshotter = snapshotter
        if snapshotter.symbols is not None:
            snapshotter.symbols.on_due = self._ask_for_base

    def _hold_still(self) -> None:
        """The training thread may be about to wait for a snapshot that it has yet to clear."""
        if self._snapshotter is not None:
            self._snapshotter.hold_still()

    def _ask_for_base(self) -> bool:
        """Any thread: there are no records until the next one. False: it may be on its way."""
        is_asked = not self.uploads.is_busy()
        self.want_again(is_asked)
        return is_asked

    def on_settled(self, inflight: Inflight) -> None:
        """Copier thread: a snapshot is complete, or void."""
        if inflight.void is None:
            self.memory_step = self.memory_step if inflight.is_symbols else inflight.step
        elif inflight.is_durable:
            if not inflight.is_announced:
                self.on_unheard(inflight)
            reason = f"snapshot of step {inflight.step} is void: {inflight.void.leaf} ({inflight.void.seen_by})"
            self.watch.note_reason(reason)
            self.uploads.fail(inflight.sequence, PersistError(reason, step=inflight.step))
            self.is_due_again = True

    def on_rank_lost(self, rank: int) -> None:
        """The line's thread: nobody is to wait for parts that may never come. What is whole is committed anyway."""
        self.uploads.fail_all(PersistError(f"rank {rank} is gone, so all ranks must restart", rank=rank))

    def on_no_agent(self, rank: int) -> None:
        """The line's thread: without the parts of that rank there are no checkpoints."""
        self.why_lost = f"the agent of rank {rank} keeps dying; see the log of that rank"
        self.uploads.fail_all(PersistError(self.why_lost, rank=rank))

    def on_agent(self, message: Message) -> None:
        """Listening thread: the agent tells what became of a snapshot."""
        assert self._snapshotter is not None
        kind, sequence = message["type"], message.get("sequence", 0)
        if kind == "durable":
            self.committed_step, self.degraded = message["step"], message.get("degraded")
            self.watch.note_committed(message["step"])
            self.uploads.succeed(sequence, message["directory"])
        elif kind == "released":
            self._snapshotter.pool.release(sequence)
            if message["is_over"]:
                self.uploads.forget(sequence)
        elif kind == "failed":
            self.watch.note_reason(message["error"])
            if message["fenced"] and message["lineage"] == self.lineage:
                self.is_fenced = True
            self.want_again(message["void"])
            if message["drift"]:
                self.has_drifted = True
            if message["final"]:
                self.uploads.fail(sequence, PersistError(message["error"], step=message["step"]))
        elif kind == "flushed":
            self.shared_step = message["step"]
        elif kind == "base_due":
            # One that is streamed is never in memory, and cannot be the base of a chain.
            self.want_again(not self._snapshotter.pool.is_streaming)
        elif kind in ("delta", "rebased", "chain_over"):
            self._on_chain(message)
        elif kind == "replaced":
            if self._snapshotter.symbols is not None:
                self._snapshotter.symbols.on_over()  # the chain went with the agent before
            self._on_new_agent(message["pid"])
        elif kind == "lost":
            self.why_lost = "the agent keeps dying; see its error in the log above"
            self.watch.note_reason(self.why_lost)
            self._snapshotter.pool.release_all()
            self.uploads.fail_all(PersistError(self.why_lost))
            self.on_lost()
        if self._snapshotter.pool.is_streaming:
            self._snapshotter.answers.put(message)  # the training thread waits for it

    def _on_chain(self, message: Message) -> None:
        """A chain has begun, has a record more, or is over."""
        symbols = None if self._snapshotter is None else self._snapshotter.symbols
        if message["type"] == "delta":
            self.delta_step = message["step"]
        if symbols is None:
            return
        if message["type"] == "delta":
            symbols.on_appended()
        elif message["type"] == "rebased":
            symbols.on_rebased(message["sequence"], message["base"])
        else:
            symbols.on_over(message["base"])
