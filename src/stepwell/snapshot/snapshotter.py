"""The sequence of a snapshot: plan, slot, announce, clone what is loose, start the copies, arm the gate.

Owns:    the order of these, the choice of strategy, and what happens after a void snapshot.
Not:     when (policy), what (state), where to (agent).
Holds:   at most one snapshot is being copied at a time; loose leaves are private before `take` returns; managed
         leaves are private before the optimizer may change them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stepwell import events, journal
from stepwell.agent.client import AgentClient
from stepwell.arena.memory import FROZEN, Arena
from stepwell.errors import PersistError
from stepwell.faults import crash_point
from stepwell.snapshot.arrange import Arrangement, Arranger
from stepwell.snapshot.choice import Choice
from stepwell.snapshot.device import CudaPages, DeviceCopier, Strategy
from stepwell.snapshot.guard import Copies, Guard, Live, content_digest
from stepwell.snapshot.host import Copier, HostCopy, HostGroup, HostWork, has_non_finite, line_up
from stepwell.snapshot.inflight import Fill, Inflight
from stepwell.snapshot.pool import Slot, SlotPool
from stepwell.snapshot.stream import Answers, stream_image
from stepwell.state.flatten import Flat
from stepwell.state.tracked import Tracked

if TYPE_CHECKING:
    from stepwell.codecs.layout import Deltas
    from stepwell.snapshot.symbols import Record, Symbols


class Snapshotter:
    """Takes snapshots of one run. Constructing only assigns; `open` says which lineage they belong to."""

    def __init__(
        self,
        tracked: Sequence[Tracked],
        *,
        strategy: str,
        verify: bool,
        host_memory: int | None,
        slots: int,
        deltas: Deltas | None = None,
        log: journal.EventLog,
        client: AgentClient,
        on_settled: Callable[[Inflight], None],
    ) -> None:
        self._choice = Choice(strategy, log)
        self._verify = verify
        self._log = log
        self._client = client
        self.symbols: Symbols | None = None
        spare = 0
        if deltas is not None and deltas.device:
            from stepwell.snapshot.symbols import SPARE_BYTES, Symbols

            spare = SPARE_BYTES
            self.symbols = Symbols(deltas, Arranger(tracked, self._number, is_partial=True), log, client.send)
        self.pool = SlotPool(slots=slots, cap_bytes=host_memory, spare_bytes=spare, pages=CudaPages(), log=log)
        self.answers = Answers()
        self._copies = Copies()
        self._copier = Copier()
        self._device = DeviceCopier()
        self._arranger = Arranger(tracked, self._number)
        self._wants_room = False
        self._sent_plans: set[int] = set()
        self._numbers = 0
        self._inflight: Inflight | None = None
        self._images: dict[tuple[int, int], torch.Tensor] = {}
        self._on_settled = on_settled

    def open(self, lineage: int) -> None:
        """Numbers of plans, arenas and snapshots are unique over all lineages."""
        self._numbers = lineage << 32

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
        if not self.pool.is_preparing and not self.pool.fits(arrangement.plan):
            self.drain()  # a copy into the old arena must be over before its memory goes
            self._let_go()
            self.pool.prepare(arrangement.plan, self._number(), lambda arena: self._hand_over(arena, arrangement))
        return arrangement

    def _hand_over(self, arena: Arena, arrangement: Arrangement) -> None:
        """Called by the preparation thread: the agent gets the arena before any snapshot in it."""
        self._client.send_arena(vars(arena.shape), arena.fd)
        if not self.pool.is_streaming:
            slots, generation = range(arena.shape.slots), arena.shape.generation
            images = {(generation, slot): self._image(arena, slot) for slot in slots}
            for device, program in arrangement.kept_devices():
                self._device.rehearse(device, program, images)
            if self.symbols is not None:
                self.symbols.prepare(arrangement, arena, images[generation, 0])

    def _let_go(self) -> None:
        self._arranger.let_go()
        if self.symbols is not None:
            self.symbols.let_go()
        self._images.clear()

    def _image(self, arena: Arena, index: int) -> torch.Tensor:
        """A slot (or the frozen image) as bytes."""
        key, shape = (arena.shape.generation, index), arena.shape
        if key not in self._images:
            count = shape.frozen_bytes if index == FROZEN else shape.slot_bytes
            self._images[key] = torch.frombuffer(
                arena.memory, dtype=torch.uint8, count=count, offset=shape.start(index)
            )
        return self._images[key]

    # -- taking one ---------------------------------------------------------------------------------------------------

    def take(self, flat: Flat, meta: dict[str, Any], *, block: bool) -> Inflight | str:
        """Start a snapshot. Returns it, or the reason why it was put off. With `block` it waits instead.

        On return the state may be changed by anything but the optimizers behind the gate.
        """
        crash_point("trigger.begin")
        started = time.monotonic()
        if self._inflight is not None and not self._inflight.done.is_set():
            # One that only stays in memory is taken at every step, so its copy is waited for: the device has work left.
            if not block and meta["durable"] and self._inflight.is_durable:
                return "the snapshot before is still being copied"
            self._inflight.wait()
        self.gate()
        arrangement = self.prepare(flat)
        while self.pool.is_preparing or not self.pool.fits(arrangement.plan):
            if not block:
                return "the arena is being made ready"
            if not self.pool.wait_prepared():
                raise PersistError("there is no host memory left for a snapshot, not even for a streamed one")
            arrangement = self.prepare(flat)
        if self.pool.is_streaming and not meta["durable"]:
            return self.pool.reason  # then nothing stays in memory
        record = self.symbols.begin(flat, arrangement) if meta["delta"] and self.symbols is not None else None
        if isinstance(record, str):
            return record
        arrangement = arrangement if record is None else record.arrangement
        if arrangement.plan.number not in self._sent_plans:
            self._client.send_layout({**arrangement.plan.message(), "is_partial": record is not None})
            self._sent_plans.add(arrangement.plan.number)
        if self.pool.is_streaming:
            return self._take_streamed(flat, arrangement, meta)
        slot = self._claim(meta, block=block)
        if slot is None:
            return "all slots are still being written: storage does not keep up"
        try:
            inflight, announce = self._start(flat, arrangement, meta, slot, record)
        except BaseException:
            self.pool.abandon(slot.sequence)  # or two such errors would leave no slot for ever
            raise
        inflight.stall_seconds = time.monotonic() - started
        self._inflight = inflight
        self._copier.submit(
            lambda: inflight.complete(
                lambda copies: self._client.begin({**announce, "copies": copies}), self._copier.copy, self._settle
            )
        )
        if inflight.strategy == "blocking":
            inflight.wait()
            inflight.stall_seconds = time.monotonic() - started
        return inflight

    def _claim(self, meta: dict[str, Any], *, block: bool) -> Slot | None:
        sequence, is_read = self._number(), meta["durable"] or meta["delta"]
        slot = self.pool.claim(sequence, is_read=is_read, block=False)
        if slot is None:
            if not self._wants_room and meta["durable"]:
                self._wants_room = True
                self._client.send({"type": "make_room"})  # one that failed may be in the way of a newer one
            slot = self.pool.claim(sequence, is_read=is_read, block=True) if block else None
        if slot is not None and meta["durable"]:
            self._wants_room = False
        return slot

    def _start(
        self, flat: Flat, arrangement: Arrangement, meta: dict[str, Any], slot: Slot, record: Record | None
    ) -> tuple[Inflight, dict[str, Any]]:
        """Copy what may change now, line up the rest. Returns the snapshot and what the agent has to know of it.

        record:  what is coded on a device; the arrangement is of the leaves beside it
        """
        arena, plan = self.pool.arena, arrangement.plan
        assert arena is not None
        arena.claim(slot.index)
        if slot.plan != plan.number:
            arena.image(slot.index, len(plan.live.header))[:] = plan.live.header
            slot.plan = plan.number
        copies_frozen = plan.frozen is not None and not self.pool.frozen_sequence
        if copies_frozen:
            assert plan.frozen is not None
            arena.claim(FROZEN)
            arena.image(FROZEN, len(plan.frozen.header))[:] = plan.frozen.header
            self.pool.frozen_sequence, self.pool.frozen_header = self._number(), plan.frozen.header
            self._arranger.note_frozen(flat)
        fixed, rest = arrangement.fixed, arrangement.rest
        inflight = Inflight(
            step=meta["step"],
            sequence=slot.sequence,
            slot=slot.index,
            arena=arena,
            plan=plan,
            strategy=self._choice.choose(arrangement, meta["step"], is_coded=record is not None),
            repeat=meta.get("repeat", 0),
            is_durable=meta["durable"],
            is_symbols=record is not None,
            frozen_sequence=self.pool.frozen_sequence if plan.frozen is not None else 0,
            copies_frozen=copies_frozen,
            guard=Guard(*_watched(arrangement, record)),
            fingerprints=self._arranger.fingerprints,
            samples=fixed.samples.take() + rest.samples.take(),
            copies=self._copies.take(flat),
        )
        try:
            self._begin_copies(inflight, arrangement)
        except torch.OutOfMemoryError:
            self._log.emit(events.Strategy(step=meta["step"], strategy="overlap", reason="the device is out of memory"))
            inflight.strategy = "overlap"
            self._begin_copies(inflight, arrangement)
        begin = {
            "type": "begin",
            **meta,
            **self._code(inflight, arrangement, record),
            "sequence": slot.sequence,
            "slot": slot.index,
            "generation": arena.shape.generation,
            "layout": plan.number,
            "frozen": inflight.frozen_sequence,
        }
        return inflight, begin

    def _code(self, inflight: Inflight, arrangement: Arrangement, record: Record | None) -> dict[str, Any]:
        """What a device has to code, and what the agent has to know of that."""
        if record is not None and self.symbols is not None:
            inflight.coded = record.digests() if self._verify else {}
            inflight.jobs.append(self.symbols.start(record, self._image(inflight.arena, inflight.slot)))
            return {"symbols": record.message()}
        if self.symbols is not None and inflight.is_durable:
            return {"coded": self.symbols.offer(arrangement, inflight.sequence, inflight.arena, inflight.slot)}
        return {}

    def _begin_copies(self, inflight: Inflight, arrangement: Arrangement) -> None:
        """Copy what is loose now, and line up the rest for the copying threads and the side streams."""
        arena, fixed, rest = inflight.arena, arrangement.fixed, arrangement.rest
        strategy: Strategy = "device" if inflight.strategy == "device" else "overlap"
        inflight.jobs, starts = [], []
        for device, program, is_live in arrangement.on_devices(with_frozen=inflight.copies_frozen):
            index = inflight.slot if is_live else FROZEN
            image, key = self._image(arena, index), (arena.shape.generation, index)
            job = self._device.start(device, program, strategy, image, key, is_live=is_live)
            inflight.jobs.append(job)
            if is_live:
                starts += program.starts(strategy)
        live = arena.address() + arena.shape.start(inflight.slot)
        copies = line_up(fixed.host + rest.host, live)
        if inflight.copies_frozen:
            frozen = arena.address() + arena.shape.start(FROZEN)
            copies += line_up(fixed.frozen_host + rest.frozen_host, frozen, is_live=False)
        starts += [copy.start for copy in copies if copy.start is not None]
        inflight.fill = Fill(
            inflight.plan.live.nbytes,
            starts,
            lambda nbytes: arena.set_filled(inflight.slot, inflight.sequence, nbytes),
        )
        inflight.host = HostWork(sorted(copies, key=_position), inflight.fill.mark)
        for source in fixed.now + rest.now:
            HostCopy(source.tensor, live + source.start, source.nbytes).run()
            if source.is_checked and has_non_finite(source.tensor):
                inflight.host.suspects[source.name] = None
        if self._verify:
            inflight.digests = {source.name: content_digest(source.tensor) for source in arrangement.late()}
        if inflight.strategy == "device" and not copies:
            inflight.look()  # everything is a clone already: nothing later can spoil it

    def _take_streamed(self, flat: Flat, arrangement: Arrangement, meta: dict[str, Any]) -> Inflight:
        arena = self.pool.arena
        assert arena is not None
        inflight = stream_image(
            self._client, arena, flat, arrangement.plan, meta, number=self._number, log=self._log, answers=self.answers
        )
        if inflight.void is not None:
            self._on_settled(inflight)
        return inflight

    # -- the gate -----------------------------------------------------------------------------------------------------

    def gate(self) -> float:
        """The only wait in the training thread: nobody may change what is still being copied. Returns the seconds."""
        inflight = self._inflight
        if inflight is None:
            return 0.0
        waited = inflight.gate()
        inflight.stall_seconds += waited
        if inflight.done.is_set() or not inflight.needs_host_wait:
            if waited > 0.0005:
                self._log.emit(events.Stall(step=inflight.step, seconds=waited))
            if inflight.done.is_set():
                self._choice.measure(inflight)
                self._inflight = None
        crash_point("gate.passed")
        return waited

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
                events.SnapshotVoid(step=inflight.step, leaf=inflight.void.leaf, seen_by=inflight.void.seen_by)
            )
        else:
            self.pool.complete(inflight.sequence)
            self._log.emit(
                events.Snapshot(
                    step=inflight.step,
                    sequence=inflight.sequence,
                    strategy=inflight.strategy,
                    nbytes=inflight.plan.live.nbytes,
                    stall_seconds=inflight.stall_seconds,
                    copy_seconds=time.monotonic() - inflight.started,
                )
            )
            if inflight.suspects:
                self._log.emit(
                    events.Suspect(step=inflight.step, leaves=len(inflight.suspects), first=inflight.suspects[0])
                )
        self._on_settled(inflight)

    def copy_now(self) -> None:
        """Copy what the host has to copy, at full speed, and wait for the verdict unless a device still copies."""
        if self._inflight is not None:
            (self._inflight.wait_host if self._inflight.jobs else self._inflight.wait)()

    def drain(self) -> None:
        """Wait until the snapshot under way is complete or void."""
        inflight = self._inflight
        if inflight is not None:
            inflight.wait()
            self._inflight = None

    def stop(self) -> None:
        """Finish the copy under way; nothing begins after it."""
        self.drain()
        self.pool.stop()

    def close(self) -> None:
        """Give the memory back."""
        self.stop()
        self._copier.close()
        self._let_go()
        self.pool.close()


def _position(copy: HostCopy | HostGroup) -> int:
    """In the order of the image, so that writing can follow; the frozen image last."""
    return copy.start if copy.start is not None else 1 << 62


def _watched(arrangement: Arrangement, record: Record | None) -> tuple[list[str], list[Live]]:
    """What must not change before the gate: names, and the ways to the live tensors."""
    fixed, rest = arrangement.fixed, arrangement.rest
    names, live = fixed.watched + rest.watched, fixed.live + rest.live
    return (names, live) if record is None else (names + record.names, live + record.live)
