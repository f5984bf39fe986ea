"""The sequence of a snapshot: plan, slot, announce, clone what is loose, start the copies, arm the gate.

Owns:    the order of these, the choice of strategy, and what happens after a void snapshot.
Not:     when (policy), what (state), where to (agent).
Holds:   at most one snapshot is being copied at a time; loose leaves are private before `take` returns; managed
         leaves are private before the optimizer may change them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from stepwell.errors import PersistError
from stepwell.events import journal, run_events
from stepwell.events.snapshot_events import NothingBetween, Outgrown
from stepwell.faults import crash_point
from stepwell.handover.client import AgentClient
from stepwell.handover.memory import Arena
from stepwell.handover.protocol import MakeRoom, NewArena
from stepwell.training.loop.waits import LONG_SECONDS
from stepwell.training.snapshot.arrange import Arrangement, Arranger
from stepwell.training.snapshot.beginning import Beginning
from stepwell.training.snapshot.device_copy import CudaPages
from stepwell.training.snapshot.host_copy import Copier
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.quiet_moment import Between
from stepwell.training.snapshot.record_size import check_size
from stepwell.training.snapshot.slots import Slot, SlotPool
from stepwell.training.snapshot.snapshot_options import SnapshotOptions
from stepwell.training.snapshot.strategy import Choice
from stepwell.training.snapshot.streamed import StreamAnswers, stream_image
from stepwell.training.state.flatten import Flat
from stepwell.training.state.tracked import Tracked
from stepwell.types import SaveRequest

_SLICE_SECONDS = 1.0

if TYPE_CHECKING:
    from stepwell.training.snapshot.coded import CodedSymbols


class Settled(Protocol):
    """What has to know how snapshots end. Any thread, and no wait."""

    def on_settled(self, inflight: Inflight) -> None:
        """One is complete, or void."""

    def ask_for_base(self) -> bool:
        """Only a new base helps a chain. Returns whether it is asked for: not while one is on its way."""


class Snapshotter:
    """Takes snapshots of one run. Constructing only assigns; `open` says which lineage they belong to."""

    def __init__(
        self,
        tracked: Sequence[Tracked],
        options: SnapshotOptions,
        *,
        log: journal.EventLog,
        client: AgentClient,
    ) -> None:
        self._choice = Choice(options.strategy, log)
        self._log = log
        self._client = client
        self.symbols: CodedSymbols | None = None
        spare, deltas = 0, options.deltas
        if deltas is not None and deltas.device:
            from stepwell.training.snapshot.coded import SPARE_BYTES, CodedSymbols

            spare = SPARE_BYTES
            self.symbols = CodedSymbols(deltas, Arranger(tracked, self._number, is_partial=True), log, client.send)
        self.pool = SlotPool(
            slots=options.slots, cap_bytes=options.host_memory, spare_bytes=spare, pages=CudaPages(), log=log
        )
        self.answers = StreamAnswers()
        self._copier = Copier()
        self._between = Between()
        self._arranger = Arranger(tracked, self._number)
        self._beginning = Beginning(
            self.pool, self._arranger, self._choice,
            verify=options.verify, symbols=self.symbols, number=self._number, log=log,
        )  # fmt: skip
        self._wants_room = False
        self.patience = LONG_SECONDS
        self._sent_plans: dict[bool, int] = {}
        """The last one, by whether it is partial."""
        self._is_told = False
        self._numbers = 0
        self._inflight: Inflight | None = None
        self._outcomes: Settled | None = None

    def open(self, lineage: int, outcomes: Settled) -> None:
        """The run is ours. Numbers of plans, arenas and snapshots are unique over all lineages."""
        self._numbers, self._outcomes = lineage << 32, outcomes
        if self.symbols is not None:
            self.symbols.open(outcomes.ask_for_base)

    def _on_settled(self, inflight: Inflight) -> None:
        if self._outcomes is not None:
            self._outcomes.on_settled(inflight)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- memory -------------------------------------------------------------------------------------------------------

    def observe(self, flat: Flat) -> None:
        """Before the first step: look at what may be frozen, to see whether the step changes it."""
        self._arranger.observe(flat)

    @property
    def is_unprepared(self) -> bool:
        """No layout was made yet."""
        return self._arranger.is_unused

    def trust_frozen(self, flat: Flat, frozen: set[str]) -> None:
        """After a restore: only leaves that were frozen in the restored checkpoint count as frozen."""
        self._arranger.trust_frozen(flat, frozen)

    def prepare(self, flat: Flat) -> Arrangement:
        """Make sure layout and arena fit this state; a new arena is made ready in the background."""
        self._arranger.is_streaming = self.pool.is_streaming
        arrangement = self._arranger.arrange(flat)
        if not (self.pool.is_preparing or self.pool.is_resting or self.pool.fits(arrangement.plan)):
            self.drain()  # a copy into the old arena must be over before its memory goes
            self._let_go()
            self.pool.prepare(arrangement.plan, self._number(), lambda arena: self._hand_over(arena, arrangement))
        return arrangement

    def _hand_over(self, arena: Arena, arrangement: Arrangement) -> None:
        """Called by the preparation thread: the agent gets the arena before any snapshot in it."""
        self._client.send_arena(NewArena(**vars(arena.shape)), arena.fd)
        if not self.pool.is_streaming:
            self._beginning.rehearse(arena, arrangement)

    def _let_go(self) -> None:
        self._arranger.let_go()
        if self.symbols is not None:
            self.symbols.let_go()
        self._beginning.let_go()

    # -- taking one ---------------------------------------------------------------------------------------------------

    def take(self, flat: Flat, request: SaveRequest, *, block: bool) -> Inflight | str:
        """Start a snapshot. Returns it, or the reason why it was put off. With `block` it waits instead.

        On return the state may be changed by anything but the optimizers behind the gate.
        """
        crash_point("trigger.begin")
        started = time.monotonic()
        if (before := self._inflight) is not None:
            before.look()
            # One that only stays in memory is taken at every step, so its copy is waited for: the device has work left.
            if not before.copied.is_set() and not block and request.durable and before.is_durable:
                return "the previous snapshot is still being copied"
            before.wait()
        self.gate()
        if block:
            self.pool.try_again()
        arrangement = self.prepare(flat)
        check_size(request.tree, flat, arrangement.plan)
        is_chased = self.pool.is_chased and request.durable
        while self.pool.is_preparing or not self.pool.fits(arrangement.plan):
            if not (block or is_chased):
                return self.pool.refused or "buffers are still being allocated"
            if not self.pool.wait_prepared(self.patience):
                raise PersistError(self.pool.refused)
            arrangement = self.prepare(flat)
        if is_chased:
            waited = time.monotonic() - started
            self._log.emit(Outgrown(step=request.step, nbytes=arrangement.plan.live.nbytes, seconds=waited))
        if self.pool.is_streaming and not request.durable:
            self._tell_nothing_between(is_delta=request.delta)
            return self.pool.reason  # then nothing stays in memory
        record = self.symbols.begin(flat, arrangement) if request.delta and self.symbols is not None else None
        if isinstance(record, str):
            return record
        arrangement = arrangement if record is None else record.arrangement
        if self._sent_plans.get(record is not None) != arrangement.plan.number:
            self._client.send_layout(arrangement.plan.message(is_partial=record is not None))
            self._sent_plans[record is not None] = arrangement.plan.number
        if self.pool.is_streaming:
            return self._take_streamed(flat, arrangement, request)
        slot = self._claim(request, block=block)
        if slot is None:
            return "storage cannot keep up: all buffers are still being written"
        try:
            inflight, announce = self._beginning.start(flat, arrangement, request, slot, record)
        except BaseException:
            self.pool.abandon(slot.sequence)  # or two such errors would leave no slot for ever
            raise
        inflight.stall_seconds, inflight.patience, self._inflight = time.monotonic() - started, self.patience, inflight
        self._copier.submit(
            lambda: inflight.complete(
                lambda copies: self._client.begin(replace(announce, copies=copies)),
                self._copier.copy,
                self._settle,
                self._between,
            )
        )
        if inflight.strategy == "blocking":
            inflight.wait()
            inflight.stall_seconds = time.monotonic() - started
        return inflight

    def _tell_nothing_between(self, *, is_delta: bool) -> None:
        if not self._is_told:
            self._is_told = True
            self._log.emit(NothingBetween(asked="deltas=" if is_delta else "memory=", reason=self.pool.reason))

    def _claim(self, request: SaveRequest, *, block: bool) -> Slot | None:
        sequence, is_read = self._number(), request.durable or request.delta
        slot = self.pool.claim(sequence, is_read=is_read)
        if slot is None:
            if not self._wants_room and request.durable:
                self._wants_room = True
                self._client.send(MakeRoom())  # one that failed may be in the way of a newer one
            slot = self._wait_for_slot(sequence, is_read=is_read) if block else None
        if slot is not None and request.durable:
            self._wants_room = False
        return slot

    def _wait_for_slot(self, sequence: int, *, is_read: bool) -> Slot:
        agent, deadline = self._client.pid, time.monotonic() + self.patience
        while (left := deadline - time.monotonic()) > 0:
            slot = self.pool.claim(sequence, is_read=is_read, seconds=min(left, _SLICE_SECONDS))
            if slot is not None:
                return slot
            if self._client.pid != agent:  # another one, which was not told
                agent = self._client.pid
                self._client.send(MakeRoom())
        raise PersistError(
            f"no memory for a snapshot became free within {self.patience:.0f} s: the agent (process {agent}) has not "
            "written its content. See `events.jsonl` for the state of its storage; the live state is unchanged"
        )

    def _take_streamed(self, flat: Flat, arrangement: Arrangement, request: SaveRequest) -> Inflight:
        arena = self.pool.arena
        assert arena is not None
        inflight = stream_image(
            self._client, arena, flat, arrangement.plan, request,
            number=self._number, log=self._log, answers=self.answers,
        )  # fmt: skip
        if inflight.void is not None:
            self._on_settled(inflight)
        return inflight

    # -- the gate -----------------------------------------------------------------------------------------------------

    def gate(self) -> float:
        """The only wait in the training thread: nobody may change what is still being copied. Returns the seconds."""
        if (inflight := self._inflight) is None:
            return 0.0
        waited = inflight.gate()
        inflight.stall_seconds += waited
        if inflight.done.is_set() or not inflight.needs_host_wait:
            if waited > 0.0005:
                self._log.emit(run_events.Stall(step=inflight.step, seconds=waited))
            if inflight.done.is_set():
                self._choice.measure(inflight)
                self._inflight = None
        crash_point("gate.passed")
        return waited

    def look(self) -> None:
        """The training thread is between two operations: let it clear what is copied. No wait."""
        if self._inflight is not None:
            self._inflight.look()

    def hold_still(self) -> None:
        """Any thread, about to wait for what becomes of the snapshot under way."""
        if (inflight := self._inflight) is not None:
            inflight.hold_still()

    def _settle(self, inflight: Inflight) -> None:
        """On the copier thread, when a snapshot is complete or void."""
        if inflight.void is not None:
            self._choice.is_blocking_next = True
            if inflight.is_symbols and self.symbols is not None:
                self.symbols.stop()
            self._arranger.distrust(inflight.changed_frozen)
            if inflight.copies_frozen:
                self.pool.frozen_sequence = 0
            self.pool.forget(inflight.sequence)
            if not inflight.is_announced:
                self.pool.release(inflight.sequence)  # the agent, which knows nothing of it, will not
            self._log.emit(
                run_events.SnapshotVoid(step=inflight.step, leaf=inflight.void.leaf, seen_by=inflight.void.seen_by)
            )
        else:
            self.pool.complete(inflight.sequence)
            self._log.emit(
                run_events.Snapshot(
                    step=inflight.step,
                    sequence=inflight.sequence,
                    strategy=inflight.strategy,
                    nbytes=inflight.plan.live.nbytes,
                    stall_seconds=inflight.stall_seconds,
                    copy_seconds=time.monotonic() - inflight.started,
                    durable=inflight.is_durable,
                )
            )
            if inflight.suspects:
                self._log.emit(
                    run_events.Suspect(step=inflight.step, leaves=len(inflight.suspects), first=inflight.suspects[0])
                )
        self._on_settled(inflight)

    def copy_now(self) -> None:
        """Copy what the host has to copy, at full speed, and wait for the verdict unless a device still copies."""
        if self._inflight is not None:
            (self._inflight.wait_host if self._inflight.jobs else self._inflight.wait)()

    def drain(self) -> None:
        """Wait until the snapshot under way is complete or void."""
        if (inflight := self._inflight) is not None:
            inflight.wait()
            if inflight.is_training_thread():  # another one may have waited until after the next snapshot began
                self._inflight = None

    def hurry(self, seconds: float) -> None:
        """The run ends: nothing is waited for longer."""
        self.patience = min(self.patience, max(_SLICE_SECONDS, seconds))
        if (inflight := self._inflight) is not None:
            inflight.patience = self.patience

    def stop(self) -> None:
        """Finish the copy under way; nothing begins after it."""
        try:
            self.drain()
        except PersistError as error:
            run_events.logger.error("%s; giving it up", error)
        self.pool.stop(self.patience)

    def close(self) -> None:
        """Give the memory back."""
        self.stop()
        self._copier.close()
        self._let_go()
        if self._inflight is None or self._inflight.done.is_set():  # else it is still being copied into that memory
            self._between.close()
            self.pool.close(self.patience)
