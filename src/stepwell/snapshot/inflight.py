"""One snapshot under way: from the trigger until its verdict is in.

Owns:    the order bytes -> suspects -> sequence -> verdict, and what the gate waits for.
Holds:   the guard looks before the optimizer may step; a snapshot that failed is void, never half there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from stepwell.arena.memory import FROZEN, Arena
from stepwell.errors import StateError
from stepwell.faults import crash_point
from stepwell.snapshot.device import DeviceJob
from stepwell.snapshot.guard import Fingerprints, Guard, content_digest
from stepwell.snapshot.host import HostCopy, copy_all


@dataclass(frozen=True)
class Void:
    """Why a snapshot does not count: which leaf, and what saw it."""

    leaf: str
    seen_by: str


@dataclass
class Inflight:
    """Everything one snapshot needs until it is complete."""

    step: int
    sequence: int
    slot: int
    arena: Arena
    strategy: str
    nbytes: int
    frozen_sequence: int
    copies_frozen: bool
    guard: Guard
    fingerprints: Fingerprints
    names: dict[str, int]
    targets: dict[str, torch.Tensor]
    checked: list[str]
    staged: Future[None] = field(default_factory=Future)
    host: list[HostCopy] = field(default_factory=list)
    jobs: list[DeviceJob] = field(default_factory=list)
    samples: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    trigger_seconds: float = 0.0
    stall_seconds: float = 0.0
    suspects: list[str] = field(default_factory=list)
    void: Void | None = None
    changed_frozen: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    _looked: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def needs_host_wait(self) -> bool:
        """Leaves on the CPU are copied by the host: the optimizer has to wait there."""
        return bool(self.host) or bool(self.digests)

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
        if self.needs_host_wait:
            self.done.wait()
        else:
            self.look()
            for job in self.jobs:
                job.gate()
        return time.monotonic() - started

    def complete(self, on_done: Callable[[Inflight], None]) -> None:
        """Runs on the copier thread: finish the copies, judge, and let the agent have the snapshot."""
        try:
            copy_all(self.host)
            flagged = [name for job in self.jobs for name in job.finish()]
            crash_point("copy.done")
            self._judge(flagged)
            if self.void is None:
                self._mark()
                crash_point("copy.complete")
        except Exception as error:  # whatever happens here must not leave the optimizer waiting for ever
            self.void = Void("?", f"copy failed: {type(error).__name__}: {error}")
        try:
            on_done(self)  # before the gate opens: the next snapshot must know how this one ended
        finally:
            if self.void is not None:
                self.arena.set_verdict(self.slot, self.sequence, is_good=False)  # last: the agent lets go at once
            self.done.set()
            self.host, self.targets = [], {}  # let go of the user's tensors
        if self.void is None:
            self.staged.set_result(None)
        else:
            text = f"snapshot of step {self.step} is void: {self.void.leaf} ({self.void.seen_by})"
            self.staged.set_exception(StateError(text, step=self.step))

    def _judge(self, flagged: list[str]) -> None:
        self.look()
        self.changed_frozen = self.fingerprints.settle(self.samples)
        if self.changed_frozen and self.void is None:
            self.void = Void(self.changed_frozen[0], "fingerprint of a frozen leaf")
        for name, digest in self.digests.items():
            if content_digest(self.targets[name]) != digest and self.void is None:
                self.void = Void(name, "verify_snapshots")
        exact = flagged + [name for name in self.checked if name not in flagged]
        self.suspects = [name for name in exact if has_non_finite(self.targets[name])]

    def _mark(self) -> None:
        if self.suspects:
            self.arena.set_suspects(self.slot, len(self.suspects), self.names[self.suspects[0]])
        if self.copies_frozen:
            self.arena.set_sequence(FROZEN, self.frozen_sequence)
            self.arena.set_verdict(FROZEN, self.frozen_sequence, is_good=True)
        self.arena.set_sequence(self.slot, self.sequence)
        self.arena.set_verdict(self.slot, self.sequence, is_good=True)


def has_non_finite(tensor: torch.Tensor) -> bool:
    """Whether a host tensor holds an infinity or a NaN. A finite sum proves it does not."""
    wide = tensor.float() if tensor.element_size() < 4 else tensor
    if bool(torch.isfinite(wide.sum())):
        return False
    return not bool(torch.isfinite(wide).all())
