"""The beginning of a snapshot: what may change is copied now, the rest is lined up for threads and devices.

Owns:    the slots seen as bytes, the work that each snapshot consists of, and what the agent has to know of it.
Not:     when, and what comes of it (snapshotter); which slot (slots).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell.events import journal, run_events
from stepwell.handover.memory import FROZEN, Arena
from stepwell.handover.protocol import Begin
from stepwell.training.snapshot.arrange import Arrangement, Arranger
from stepwell.training.snapshot.device_copy import DeviceCopier, Strategy
from stepwell.training.snapshot.guard import Copies, Guard, Live
from stepwell.training.snapshot.host_copy import HostCopy, HostGroup, HostWork, has_non_finite, line_up
from stepwell.training.snapshot.inflight import Fill, Inflight
from stepwell.training.snapshot.slots import Slot, SlotPool
from stepwell.training.snapshot.strategy import Choice
from stepwell.training.state.fingerprint import content_digest
from stepwell.training.state.flatten import Flat
from stepwell.types import CodedPlace, SaveRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell.training.snapshot.coded import CodedRecord, CodedSymbols


class Beginning:
    """Of each snapshot of one run. Constructing only assigns."""

    def __init__(
        self,
        pool: SlotPool,
        arranger: Arranger,
        choice: Choice,
        *,
        verify: bool,
        symbols: CodedSymbols | None,
        number: Callable[[], int],
        log: journal.EventLog,
    ) -> None:
        self._pool, self._arranger, self._choice = pool, arranger, choice
        self._verify, self._symbols, self._number, self._log = verify, symbols, number, log
        self._copies = Copies()
        self._device = DeviceCopier()
        self._images: dict[tuple[int, int], torch.Tensor] = {}

    def rehearse(self, arena: Arena, arrangement: Arrangement) -> None:
        """The arena is new: prepare the copies of devices into each of its slots."""
        slots, generation = range(arena.shape.slots), arena.shape.generation
        images = {(generation, slot): self._image(arena, slot) for slot in slots}
        for device, program in arrangement.kept_devices():
            self._device.rehearse(device, program, images)
        if self._symbols is not None:
            self._symbols.prepare(arrangement, arena, images[generation, 0])

    def let_go(self) -> None:
        """The arena goes."""
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

    def start(
        self, flat: Flat, arrangement: Arrangement, request: SaveRequest, slot: Slot, record: CodedRecord | None
    ) -> tuple[Inflight, Begin]:
        """Copy what may change now, line up the rest. Returns the snapshot and what the agent has to know of it.

        record:  what is coded on a device; the arrangement is of the leaves beside it
        """
        arena, plan = self._pool.arena, arrangement.plan
        assert arena is not None
        arena.claim(slot.index)
        if slot.plan != plan.number:
            arena.image(slot.index, len(plan.live.header))[:] = plan.live.header
            slot.plan = plan.number
        copies_frozen = plan.frozen is not None and not self._pool.frozen_sequence
        if copies_frozen:
            assert plan.frozen is not None
            arena.claim(FROZEN)
            arena.image(FROZEN, len(plan.frozen.header))[:] = plan.frozen.header
            self._pool.frozen_sequence, self._pool.frozen_header = self._number(), plan.frozen.header
            self._arranger.note_frozen(flat)
        fixed, rest = arrangement.fixed, arrangement.rest
        inflight = Inflight(
            step=request.step,
            sequence=slot.sequence,
            slot=slot.index,
            arena=arena,
            plan=plan,
            strategy=self._choice.choose(arrangement, request.step, is_coded=record is not None),
            repeat=request.repeat,
            is_durable=request.durable,
            is_symbols=record is not None,
            frozen_sequence=self._pool.frozen_sequence if plan.frozen is not None else 0,
            copies_frozen=copies_frozen,
            guard=Guard(*_watched(arrangement, record)),
            fingerprints=self._arranger.fingerprints,
            samples=fixed.samples.take() + rest.samples.take(),
            copies=self._copies.take(flat),
        )
        try:
            self._begin_copies(inflight, arrangement)
        except torch.OutOfMemoryError:
            self._log.emit(
                run_events.Strategy(step=request.step, strategy="overlap", reason="the device is out of memory")
            )
            inflight.strategy = "overlap"
            self._begin_copies(inflight, arrangement)
        coded, symbols = self._code(inflight, arrangement, record)
        begin = Begin(
            request,
            slot.sequence,
            slot.index,
            arena.shape.generation,
            plan.number,
            inflight.frozen_sequence,
            coded=coded,
            symbols=symbols,
        )
        return inflight, begin

    def _code(
        self, inflight: Inflight, arrangement: Arrangement, record: CodedRecord | None
    ) -> tuple[tuple[int, ...], CodedPlace | None]:
        """What a device has to code: the parts of it in later records, and where those of this one are."""
        if record is not None and self._symbols is not None:
            inflight.coded = record.digests() if self._verify else {}
            inflight.jobs.append(self._symbols.start(record, self._image(inflight.arena, inflight.slot)))
            return (), record.place()
        if self._symbols is not None and inflight.is_durable:
            return self._symbols.offer(arrangement, inflight.sequence, inflight.arena, inflight.slot), None
        return (), None

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
            inflight.look(is_last=True)  # everything is a clone already


def _position(copy: HostCopy | HostGroup) -> int:
    """In the order of the image, so that writing can follow; the frozen image last."""
    return copy.start if copy.start is not None else 1 << 62


def _watched(arrangement: Arrangement, record: CodedRecord | None) -> tuple[list[str], list[Live]]:
    """What must not change before the gate: names, and the ways to the live tensors."""
    fixed, rest = arrangement.fixed, arrangement.rest
    names, live = fixed.watched + rest.watched, fixed.live + rest.live
    return (names, live) if record is None else (names + record.names, live + record.live)
