"""The sequence of a snapshot: plan, slot, announce, clone what is loose, start the copies, arm the gate.

Owns:    the order of these, the choice of strategy, and what happens after a void snapshot.
Not:     when (policy), what (state), where to (agent).
Holds:   at most one snapshot is being copied at a time; loose leaves are private before `take` returns; managed
         leaves are private before the optimizer may change them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepwell import events, journal
from stepwell.agent.client import AgentClient
from stepwell.arena.memory import FROZEN, Arena
from stepwell.errors import PersistError
from stepwell.faults import crash_point
from stepwell.format import dtypes
from stepwell.snapshot.device import CudaPages, DeviceCopier, DeviceCopy, Strategy, spare_bytes
from stepwell.snapshot.guard import Fingerprints, Guard, content_digest, facts
from stepwell.snapshot.host import Copier, HostCopy
from stepwell.snapshot.inflight import Inflight
from stepwell.snapshot.plan import Plan, make_plan, signature
from stepwell.snapshot.pool import Slot, SlotPool
from stepwell.snapshot.stream import Answers, stream_image
from stepwell.state.flatten import Flat, Leaf
from stepwell.state.roles import Role, assign_roles
from stepwell.state.tracked import Tracked

_TINY_BYTES = 1024  # a managed leaf on the CPU this small (Adam's step counters) is copied at the trigger


class Snapshotter:
    """Takes snapshots of one run. Constructing only assigns; `open` says which lineage they belong to."""

    def __init__(
        self,
        tracked: Sequence[Tracked],
        *,
        strategy: str,
        verify: bool,
        host_memory: int | None,
        log: journal.EventLog,
        client: AgentClient,
        on_settled: Callable[[Inflight], None],
    ) -> None:
        self._tracked = tracked
        self._wanted = strategy
        self._verify = verify
        self._log = log
        self._client = client
        self.pool = SlotPool(cap_bytes=host_memory, pages=CudaPages(), log=log)
        self.answers = Answers()
        self._copier = Copier()
        self._device = DeviceCopier()
        self._fingerprints = Fingerprints()
        self._not_frozen: set[str] = set()
        self._frozen_facts: dict[str, tuple[int, int]] = {}
        self._wants_room = False
        self._plan: Plan | None = None
        self._sent_plan = -1
        self._numbers = 0
        self._inflight: Inflight | None = None
        self._blocking_next = False
        self._strategy: Strategy | None = None
        self._waits: dict[str, float] = {}
        self._targets: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._on_settled = on_settled

    def open(self, lineage: int) -> None:
        """Numbers of plans, arenas and snapshots are unique over all lineages."""
        self._numbers = lineage << 32

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- frozen leaves ------------------------------------------------------------------------------------------------

    def observe(self, flat: Flat) -> None:
        """Before the first step: sample what may be frozen, to see whether the step changes it."""
        self._fingerprints.settle(self._fingerprints.take(self._frozen_leaves(flat, self._roles(flat))))

    def trust_frozen(self, flat: Flat, known: set[str]) -> None:
        """After a restore: only leaves that were frozen in the restored checkpoint count as frozen."""
        self._not_frozen = {leaf.name for leaf in flat.leaves} - known

    def _roles(self, flat: Flat) -> list[Role]:
        if self.pool.is_streaming:
            return assign_roles(flat.leaves, self._tracked, {leaf.name for leaf in flat.leaves})
        return assign_roles(flat.leaves, self._tracked, self._not_frozen)

    def _frozen_leaves(self, flat: Flat, roles: Sequence[Role]) -> list[tuple[str, torch.Tensor]]:
        pairs = zip(flat.leaves, roles, strict=True)
        return [(leaf.name, leaf.tensor) for leaf, role in pairs if role.protection == "frozen"]

    # -- memory -------------------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat) -> tuple[Plan, list[Role]]:
        """Make sure plan and arena fit this state; a new arena is made ready in the background."""
        roles = self._roles(flat)
        if self._notice_moved(flat, roles):
            roles = self._roles(flat)
        if self._plan is None:
            frozen = self._frozen_leaves(flat, roles)
            self._not_frozen.update(self._fingerprints.settle(self._fingerprints.take(frozen)))
            roles = self._roles(flat)
        if self._plan is None or signature(flat.leaves, roles) != self._plan.signature:
            self._plan = make_plan(self._number(), flat.leaves, roles)
            self._targets.clear()
        if not self.pool.is_preparing and not self.pool.fits(self._plan):
            self.drain()  # a copy into the old arena must be over before its memory goes
            self.pool.prepare(self._plan, self._number(), self._hand_over)
        return self._plan, roles

    def _notice_moved(self, flat: Flat, roles: Sequence[Role]) -> bool:
        """A frozen leaf whose version or address is not that of its copy is frozen no more."""
        moved = {
            name
            for name, tensor in self._frozen_leaves(flat, roles)
            if name in self._frozen_facts and self._frozen_facts[name] != facts(tensor)
        }
        self._not_frozen |= moved
        return bool(moved)

    def _hand_over(self, arena: Arena) -> None:
        """Called by the preparation thread: the agent gets the arena before any snapshot in it."""
        self._client.send_arena(vars(arena.shape), arena.fd)

    @property
    def is_unprepared(self) -> bool:
        """No plan was made yet."""
        return self._plan is None

    def _target_views(self, arena: Arena, slot: Slot, plan: Plan) -> dict[str, torch.Tensor]:
        """Tensors over the slot's bytes, one per leaf, made once per slot and plan."""
        key = (arena.shape.generation, slot.index)
        if key not in self._targets or slot.plan != plan.number:
            views = plan.views(arena, slot.index)
            self._targets[key] = views
            arena.image(slot.index, len(plan.live.header))[:] = plan.live.header
            slot.plan = plan.number
        return self._targets[key]

    # -- taking one ---------------------------------------------------------------------------------------------------

    def take(self, flat: Flat, meta: dict[str, Any], *, block: bool) -> Inflight | str:
        """Start a snapshot. Returns it, or the reason why it was put off. With `block` it waits instead.

        On return the state may be changed by anything but the optimizers behind the gate.
        """
        crash_point("trigger.begin")
        started = time.monotonic()
        if self._inflight is not None and not self._inflight.done.is_set():
            if not block:
                return "the snapshot before is still being copied"
            self._inflight.done.wait()
        self.gate()
        plan, roles = self.prepare(flat)
        while self.pool.is_preparing or not self.pool.fits(plan):
            if not block:
                return "the arena is being made ready"
            if not self.pool.wait_prepared():
                raise PersistError("there is no host memory left for a snapshot, not even for a streamed one")
            plan, roles = self.prepare(flat)
        if plan.number != self._sent_plan:
            self._client.send_layout(plan.message())
            self._sent_plan = plan.number
        if self.pool.is_streaming:
            return self._take_streamed(flat, plan, meta)
        sequence = self._number()
        slot = self.pool.claim(sequence, block=False)
        if slot is None:
            if not self._wants_room:
                self._wants_room = True
                self._client.send({"type": "make_room"})  # one that failed may be in the way of a newer one
            slot = self.pool.claim(sequence, block=True) if block else None
        if slot is None:
            return "both slots are still being written: storage does not keep up"
        self._wants_room = False
        try:
            inflight = self._start(flat, plan, roles, meta, sequence, slot)
        except BaseException:
            self.pool.abandon(sequence)  # or two such errors would leave no slot for ever
            raise
        inflight.trigger_seconds = inflight.stall_seconds = time.monotonic() - started
        self._inflight = inflight
        self._copier.submit(lambda: inflight.complete(self._settle))
        if inflight.strategy == "blocking":
            inflight.done.wait()
            inflight.stall_seconds = time.monotonic() - started
        return inflight

    def _start(
        self, flat: Flat, plan: Plan, roles: Sequence[Role], meta: dict[str, Any], sequence: int, slot: Slot
    ) -> Inflight:
        arena = self.pool.arena
        assert arena is not None
        arena.claim(slot.index)
        targets = self._target_views(arena, slot, plan)
        copies_frozen = plan.frozen is not None and not self.pool.frozen_sequence
        if copies_frozen:
            assert plan.frozen is not None
            arena.claim(FROZEN)
            arena.image(FROZEN, len(plan.frozen.header))[:] = plan.frozen.header
            self.pool.frozen_sequence, self.pool.frozen_header = self._number(), plan.frozen.header
            self._frozen_facts = {name: facts(tensor) for name, tensor in self._frozen_leaves(flat, roles)}
        inflight = Inflight(
            step=meta["step"],
            sequence=sequence,
            slot=slot.index,
            arena=arena,
            strategy=self._choose(flat, meta["step"]),
            nbytes=plan.live.nbytes,
            frozen_sequence=self.pool.frozen_sequence if plan.frozen is not None else 0,
            copies_frozen=copies_frozen,
            guard=Guard(),
            fingerprints=self._fingerprints,
            names={entry.name: index for index, entry in enumerate(plan.entries)},
            targets=targets,
            checked=[],
        )
        self._client.begin(
            {
                "type": "begin",
                **meta,
                "sequence": sequence,
                "slot": slot.index,
                "generation": arena.shape.generation,
                "layout": plan.number,
                "frozen": inflight.frozen_sequence,
            }
        )
        crash_point("trigger.announced")
        try:
            self._issue(inflight, flat, roles, plan)
        except torch.OutOfMemoryError:
            self._log.emit(events.Strategy(step=meta["step"], strategy="overlap", reason="the device is out of memory"))
            inflight.strategy = "overlap"
            self._issue(inflight, flat, roles, plan)
        return inflight

    def _issue(self, inflight: Inflight, flat: Flat, roles: Sequence[Role], plan: Plan) -> None:
        """Copy what is loose now, and line up the rest for the copier thread and the side streams."""
        inflight.host.clear()
        inflight.jobs.clear()
        on_device: dict[torch.device, list[DeviceCopy]] = {}
        base = inflight.arena.address()
        for leaf, role in zip(flat.leaves, roles, strict=True):
            place = plan.places[leaf.name]
            if place.is_frozen:
                inflight.samples.update(self._fingerprints.take([(leaf.name, leaf.tensor)]))
                if not inflight.copies_frozen:
                    inflight.guard.watch(leaf.name, role.live)
                    continue
            late = role.protection != "loose"
            if late:
                inflight.guard.watch(leaf.name, role.live)
            if leaf.tensor.device.type == "cpu":
                start = inflight.arena.shape.start(FROZEN if place.is_frozen else inflight.slot) + place.start
                copy = HostCopy(leaf.tensor, base + start, place.nbytes)
                if late and place.nbytes > _TINY_BYTES:
                    inflight.host.append(copy)
                    self._remember(inflight, leaf)
                else:
                    copy.run()
                if role.protection == "managed" and leaf.dtype in dtypes.FLOATING:
                    inflight.checked.append(leaf.name)
            else:
                target = inflight.targets[leaf.name]
                on_device.setdefault(leaf.tensor.device, []).append(DeviceCopy(leaf.name, leaf.tensor, target, late))
                if late:
                    self._remember(inflight, leaf)
        strategy: Strategy = "device" if inflight.strategy == "device" else "overlap"
        inflight.jobs.extend(self._device.start(device, copies, strategy) for device, copies in on_device.items())
        if inflight.strategy == "device":
            inflight.look()  # everything is a clone already: nothing later can spoil it

    def _remember(self, inflight: Inflight, leaf: Leaf) -> None:
        if self._verify:
            inflight.digests[leaf.name] = content_digest(leaf.tensor)

    def _take_streamed(self, flat: Flat, plan: Plan, meta: dict[str, Any]) -> Inflight:
        arena = self.pool.arena
        assert arena is not None
        inflight = stream_image(
            self._client, arena, flat, plan, meta, number=self._number, log=self._log, answers=self.answers
        )
        if inflight.void is not None:
            self._on_settled(inflight)
        return inflight

    # -- strategy -----------------------------------------------------------------------------------------------------

    def _choose(self, flat: Flat, step: int) -> Strategy:
        """Blocking after a void snapshot; on the device where that is wished for, or measured to wait less."""
        if self._blocking_next or self._wanted == "blocking":
            self._blocking_next = False
            return "blocking"
        devices = {leaf.tensor.device for leaf in flat.leaves if leaf.tensor.device.type == "cuda"}
        if not devices or self._wanted == "overlap":
            return "overlap"
        wanted: Strategy = "overlap"
        if self._wanted == "device":
            wanted = "device"
        elif self._waits.get("overlap", 0.0) > self._waits.get("device", 0.0):
            wanted = "device"  # the gate was seen to wait; cloning on the device is tried, then the lesser wait stays
        if wanted == "device":
            for device in devices:
                need = sum(leaf.tensor.nbytes for leaf in flat.leaves if leaf.tensor.device == device)
                spare = spare_bytes(device)
                if need > spare:
                    reason = f"{need} bytes on {device} do not fit into the {max(0, spare)} that are spare"
                    self._switch("overlap", step, reason)
                    return "overlap"
            self._switch("device", step, "asked for" if self._wanted == "device" else "waits less at the gate")
        else:
            self._switch("overlap", step, "waits less at the gate" if self._waits else "nothing is measured yet")
        return wanted

    def _switch(self, strategy: Strategy, step: int, reason: str) -> None:
        if strategy != self._strategy:
            self._strategy = strategy
            self._log.emit(events.Strategy(step=step, strategy=strategy, reason=reason))

    # -- the gate -----------------------------------------------------------------------------------------------------

    def gate(self) -> None:
        """The only wait in the training thread: nobody may change what is still being copied."""
        inflight = self._inflight
        if inflight is None:
            return
        waited = inflight.gate()
        inflight.stall_seconds += waited
        if inflight.done.is_set() or not inflight.needs_host_wait:
            if waited > 0.0005:
                self._log.emit(events.Stall(step=inflight.step, seconds=waited))
            if inflight.done.is_set():
                self._measure(inflight)
                self._inflight = None
        crash_point("gate.passed")

    def _measure(self, inflight: Inflight) -> None:
        waits = [job.waited_seconds() for job in inflight.jobs]
        known = [wait for wait in waits if wait is not None]
        if known:
            self._waits[inflight.strategy] = max(known)
        elif inflight.strategy == "device":
            self._waits["device"] = inflight.trigger_seconds

    def _settle(self, inflight: Inflight) -> None:
        """On the copier thread, when a snapshot is complete or void."""
        if inflight.void is not None:
            self._blocking_next = True
            self._not_frozen.update(inflight.changed_frozen)
            if inflight.copies_frozen:
                self.pool.frozen_sequence = 0
            self.pool.forget(inflight.sequence)
            self._log.emit(
                events.SnapshotVoid(step=inflight.step, leaf=inflight.void.leaf, seen_by=inflight.void.seen_by)
            )
        else:
            self._log.emit(
                events.Snapshot(
                    step=inflight.step,
                    sequence=inflight.sequence,
                    strategy=inflight.strategy,
                    nbytes=inflight.nbytes,
                    stall_seconds=inflight.stall_seconds,
                    copy_seconds=time.monotonic() - inflight.started,
                )
            )
            if inflight.suspects:
                self._log.emit(
                    events.Suspect(step=inflight.step, leaves=len(inflight.suspects), first=inflight.suspects[0])
                )
        self._on_settled(inflight)

    def drain(self) -> None:
        """Wait until the snapshot under way is complete or void."""
        inflight = self._inflight
        if inflight is not None:
            inflight.done.wait()
            self._inflight = None

    def close(self) -> None:
        """Finish the copy under way and give the memory back."""
        self.drain()
        self._copier.close()
        self._targets.clear()
        self.pool.close()
