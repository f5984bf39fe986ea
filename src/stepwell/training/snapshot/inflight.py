"""One snapshot under way: from the trigger until its verdict is in.

Owns:    the order issue -> announce -> bytes -> suspects -> sequence -> verdict, and what the gate waits for.
Holds:   the guard looks before the optimizer may step; a snapshot that failed is void, never half there. The verdict
         is good only after a look that no change could hide from: at the gate, or after the last byte, while the
         training thread was between two operations. torch counts a change when it is over, so the copier, which
         looks at any time, may only void.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stepwell.errors import StateError
from stepwell.events.run_events import logger
from stepwell.faults import crash_point
from stepwell.handover.memory import FROZEN, Arena
from stepwell.training.loop.completion import Completion, nothing
from stepwell.training.loop.waits import LONG_SECONDS, until
from stepwell.training.snapshot.guard import Fingerprints, Guard, Taken, digests
from stepwell.training.snapshot.host_copy import HostWork
from stepwell.training.snapshot.layout import Plan
from stepwell.training.snapshot.quiet_moment import Between
from stepwell.training.state.fingerprint import content_digest

_LOOK_SECONDS = 1.0
"""How often it is asked whether the training thread has ended."""


@dataclass(frozen=True)
class VoidReason:
    """Why a snapshot does not count: which leaf, and what saw it."""

    leaf: str
    seen_by: str


class CopyJob(Protocol):
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
    staged: Completion[None] = field(init=False)
    host: HostWork = field(default_factory=lambda: HostWork([], lambda start: None))
    fill: Fill = field(default_factory=lambda: Fill(0, [], lambda nbytes: None))
    jobs: list[CopyJob] = field(default_factory=list)
    samples: list[tuple[list[str], list[int], torch.Tensor]] = field(default_factory=list)
    copies: list[Taken] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    coded: dict[str, tuple[torch.Tensor, str]] = field(default_factory=dict)
    """Live tensors that are coded and not copied, with their digests at the trigger; as `digests` only to verify."""
    started: float = field(default_factory=time.monotonic)
    stall_seconds: float = 0.0
    suspects: list[str] = field(default_factory=list)
    void: VoidReason | None = None
    changed_frozen: list[str] = field(default_factory=list)
    is_announced: bool = False
    patience: float = LONG_SECONDS
    """Seconds that somebody waits for it."""
    copied: threading.Event = field(default_factory=threading.Event)
    """All bytes are in the slot, or it is void."""
    done: threading.Event = field(default_factory=threading.Event)
    _trainer: threading.Thread = field(default_factory=threading.current_thread)
    _judged: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.staged = Completion(self.hold_still)

    @property
    def needs_host_wait(self) -> bool:
        """Leaves on the CPU are copied by the host: the optimizer has to wait there."""
        return not self.host.copied.is_set() or self.is_verified

    @property
    def is_verified(self) -> bool:
        """Whether contents are compared: nothing may change before that is done."""
        return bool(self.digests or self.coded)

    def look(self, *, is_last: bool = False) -> None:
        """Let the guard look. A change voids it, no change clears it if the training thread looks after the last byte.

        is_last:  nothing can change any more what is still to be copied
        """
        is_sure = is_last or (self.copied.is_set() and self.is_training_thread())
        self._look(is_sure=is_sure)

    def _look(self, *, is_sure: bool) -> None:
        with self._lock:
            if self._judged.is_set():
                return
            changed = self.guard.changed()
            if changed is not None:
                self.void = self.void or VoidReason(changed, "version guard")
            if changed is not None or is_sure:
                self._judged.set()

    def is_training_thread(self) -> bool:
        """Whether this is the thread that took it, or that one has ended."""
        return threading.current_thread() is self._trainer or not self._trainer.is_alive()

    def gate(self) -> float:
        """Hold the optimizer back. Returns the seconds the host waited (device waits are on the device)."""
        if self.done.is_set():
            return 0.0
        started = time.monotonic()
        self.wait_host()
        self.look(is_last=True)
        if self.is_verified:
            until(self.done, self._what, self.patience)
        else:
            for job in self.jobs:
                job.gate()
        return time.monotonic() - started

    def hold_still(self) -> None:
        """The training thread is about to wait for what becomes of it, and would not be there to clear it."""
        if self.is_training_thread():
            self.gate()

    def waits(self) -> list[float | None]:
        """What each device's compute stream lost to this snapshot; None where that is not known yet."""
        return [job.waited_seconds() for job in self.jobs]

    def wait_host(self) -> None:
        """Until the leaves on the CPU are copied. The waiting thread helps."""
        self.host.help()
        until(self.host.copied, self._what, self.patience)

    @property
    def _what(self) -> str:
        return f"the end of the copy of step {self.step}"

    def wait(self) -> None:
        """Until it is complete or void. The waiting thread helps."""
        self.host.help()
        until(self.copied, self._what, self.patience)
        self.look()
        until(self.done, self._what, self.patience)

    def complete(
        self,
        announce: Callable[[dict[str, str]], None],
        copy: Callable[[HostWork], None],
        settle: Callable[[Inflight], None],
        between: Between,
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
            until(self.host.copied, self._what)
            crash_point("copy.done")
            self._check(flagged)
            self.copied.set()
            self._judge(between)
            if self.void is None:
                self._mark()
                crash_point("copy.complete")
        except Exception as error:  # whatever happens here must not leave the optimizer waiting for ever
            self.host.stop(error)  # before the slot is free for the next one
            for job in self.jobs:
                job.stop()
            self.void = VoidReason("?", f"copy failed: {type(error).__name__}: {error}")
        self.copied.set()
        unsettled: Exception | None = None
        try:
            settle(self)  # before the gate opens: the next snapshot must know how this one ended
        except Exception as error:
            logger.exception("cannot note the outcome of the snapshot of step %d", self.step)
            unsettled = error
        finally:
            if self.void is not None:
                self.arena.set_verdict(self.slot, self.sequence, is_good=False)  # last: the agent lets go at once
            self.done.set()
            self.samples, self.copies, self.coded, self.guard = [], [], {}, Guard()  # let go of the user's tensors
        self.staged.before_wait = nothing  # a handle may be kept for long, and the arena is not to stay for it
        if unsettled is not None:
            self.staged.set_exception(unsettled)
        elif self.void is None:
            self.staged.set_result(None)
        else:
            text = f"snapshot of step {self.step} is void: {self.void.leaf} ({self.void.seen_by})"
            self.staged.set_exception(StateError(text, step=self.step))

    def _judge(self, between: Between) -> None:
        """Wait for the look that counts, unless a change shows already."""
        self._look(is_sure=False)
        if self.void is None and self._trainer is threading.main_thread():
            between.wait(self._judged)
            self._look(is_sure=True)
        while self.void is None and not self._judged.wait(_LOOK_SECONDS):
            if not self._trainer.is_alive():
                self._look(is_sure=True)

    def _check(self, flagged: list[str]) -> None:
        """What the copies say of themselves."""
        if self.host.error is not None:
            raise self.host.error
        self.changed_frozen = self.fingerprints.settle(self.samples)
        if self.changed_frozen and self.void is None:
            self.void = VoidReason(self.changed_frozen[0], "fingerprint of a frozen leaf")
        for name, digest in self.digests.items():
            if content_digest(self.plan.view(self.arena, self.slot, name)) != digest and self.void is None:
                self.void = VoidReason(name, "verify_snapshots")
        for name, (tensor, digest) in self.coded.items():
            if content_digest(tensor) != digest and self.void is None:
                self.void = VoidReason(name, "verify_snapshots")
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
