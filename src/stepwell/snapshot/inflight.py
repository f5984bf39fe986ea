"""One snapshot under way: from the trigger until its verdict is in.

Owns:    the order issue -> announce -> bytes -> suspects -> sequence -> verdict, and what the gate waits for.
Holds:   the guard looks before the optimizer may step; a snapshot that failed is void, never half there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stepwell.arena.memory import FROZEN, Arena
from stepwell.errors import StateError
from stepwell.faults import crash_point
from stepwell.snapshot.guard import Fingerprints, Guard, Taken, content_digest, digests
from stepwell.snapshot.host import HostWork
from stepwell.snapshot.plan import Plan


@dataclass(frozen=True)
class Void:
    """Why a snapshot does not count: which leaf, and what saw it."""

    leaf: str
    seen_by: str


class Job(Protocol):
    """What a device does for a snapshot (`device`, `symbols`)."""

    def issue(self) -> None: ...

    def gate(self) -> None: ...

    def stop(self) -> None: ...

    def waited_seconds(self) -> float | None: ...

    def finish(self, on_copied: Callable[[int], None]) -> list[str]: ...


class Fill:
    """How much of an image is final while several threads and streams fill it."""

    def __init__(self, nbytes: int, starts: Sequence[int], on_more: Callable[[int], None]) -> None:
        self._ends = [*sorted(starts), nbytes]
        self._copied: set[int] = set()
        self._next = 0
        self._on_more = on_more
        self._lock = threading.Lock()

    def mark(self, start: int) -> None:
        """The piece that begins here is copied. Everything before the first one that is not is final."""
        with self._lock:
            self._copied.add(start)
            before = self._next
            while self._ends[self._next] in self._copied:
                self._next += 1
            if self._next > before:
                self._on_more(self._ends[self._next])


@dataclass
class Inflight:
    """Everything one snapshot needs until it is complete."""

    step: int
    sequence: int
    slot: int
    arena: Arena
    plan: Plan
    strategy: str
    repeat: int = 0
    is_durable: bool = True
    is_symbols: bool = False
    """What changed, coded: no state that could be restored from memory."""
    frozen_sequence: int = 0
    copies_frozen: bool = False
    guard: Guard = field(default_factory=Guard)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    staged: Future[None] = field(default_factory=Future)
    host: HostWork = field(default_factory=lambda: HostWork([], lambda start: None))
    fill: Fill = field(default_factory=lambda: Fill(0, [], lambda nbytes: None))
    jobs: list[Job] = field(default_factory=list)
    samples: list[tuple[list[str], list[int], torch.Tensor]] = field(default_factory=list)
    copies: list[Taken] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    coded: dict[str, tuple[torch.Tensor, str]] = field(default_factory=dict)
    """Live tensors that are coded and not copied, with their digests at the trigger; as `digests` only to verify."""
    started: float = field(default_factory=time.monotonic)
    stall_seconds: float = 0.0
    suspects: list[str] = field(default_factory=list)
    void: Void | None = None
    changed_frozen: list[str] = field(default_factory=list)
    is_announced: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    _looked: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def needs_host_wait(self) -> bool:
        """Leaves on the CPU are copied by the host: the optimizer has to wait there."""
        return not self.host.copied.is_set() or self.is_verified

    @property
    def is_verified(self) -> bool:
        """Whether contents are compared: nothing may change before that is done."""
        return bool(self.digests or self.coded)

    def look(self) -> None:
        """Let the guard look, once: at the gate, or when the copy is done if no step came before."""
        with self._lock:
            if self._looked:
                return
            self._looked = True
            changed = self.guard.changed()
            if changed is not None:
                self.void = Void(changed, "version guard")

    def gate(self) -> float:
        """Hold the optimizer back. Returns the seconds the host waited (device waits are on the device)."""
        if self.done.is_set():
            return 0.0
        started = time.monotonic()
        if self.is_verified:
            self.wait()
        else:
            self.wait_host()
            self.look()
            for job in self.jobs:
                job.gate()
        return time.monotonic() - started

    def waits(self) -> list[float | None]:
        """What each device's compute stream lost to this snapshot; None where that is not known yet."""
        return [job.waited_seconds() for job in self.jobs]

    def wait_host(self) -> None:
        """Until the leaves on the CPU are copied. The waiting thread helps."""
        self.host.help()
        self.host.copied.wait()

    def wait(self) -> None:
        """Until it is complete or void. The waiting thread helps."""
        self.host.help()
        self.done.wait()

    def complete(
        self,
        announce: Callable[[dict[str, str]], None],
        copy: Callable[[HostWork], None],
        settle: Callable[[Inflight], None],
    ) -> None:
        """Runs on the copier thread: issue and finish the copies, judge, and let the agent have the snapshot."""
        try:
            for job in self.jobs:
                job.issue()
            announce(digests(self.copies))
            self.is_announced = True
            crash_point("trigger.announced")
            copy(self.host)
            flagged = [name for job in self.jobs for name in job.finish(self.fill.mark)]
            self.host.copied.wait()
            crash_point("copy.done")
            self._judge(flagged)
            if self.void is None:
                self._mark()
                crash_point("copy.complete")
        except Exception as error:  # whatever happens here must not leave the optimizer waiting for ever
            self.host.stop(error)  # before the slot is free for the next one
            for job in self.jobs:
                job.stop()
            self.void = Void("?", f"copy failed: {type(error).__name__}: {error}")
        try:
            settle(self)  # before the gate opens: the next snapshot must know how this one ended
        finally:
            if self.void is not None:
                self.arena.set_verdict(self.slot, self.sequence, is_good=False)  # last: the agent lets go at once
            self.done.set()
            self.samples, self.copies, self.coded, self.guard = [], [], {}, Guard()  # let go of the user's tensors
        if self.void is None:
            self.staged.set_result(None)
        else:
            text = f"snapshot of step {self.step} is void: {self.void.leaf} ({self.void.seen_by})"
            self.staged.set_exception(StateError(text, step=self.step))

    def _judge(self, flagged: list[str]) -> None:
        if self.host.error is not None:
            raise self.host.error
        self.look()
        self.changed_frozen = self.fingerprints.settle(self.samples)
        if self.changed_frozen and self.void is None:
            self.void = Void(self.changed_frozen[0], "fingerprint of a frozen leaf")
        for name, digest in self.digests.items():
            if content_digest(self.plan.view(self.arena, self.slot, name)) != digest and self.void is None:
                self.void = Void(name, "verify_snapshots")
        for name, (tensor, digest) in self.coded.items():
            if content_digest(tensor) != digest and self.void is None:
                self.void = Void(name, "verify_snapshots")
        self.suspects = flagged + list(self.host.suspects)

    def _mark(self) -> None:
        if self.suspects:
            self.arena.set_suspects(self.slot, len(self.suspects), self.plan.places[self.suspects[0]].index)
        if self.copies_frozen:
            self.arena.set_sequence(FROZEN, self.frozen_sequence)
            self.arena.set_verdict(FROZEN, self.frozen_sequence, is_good=True)
        self.arena.set_filled(self.slot, self.sequence, self.plan.live.nbytes)
        self.arena.set_sequence(self.slot, self.sequence)
        self.arena.set_verdict(self.slot, self.sequence, is_good=True)
