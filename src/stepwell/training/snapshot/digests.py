"""Digests of what leaves hold at one moment, taken while training goes on.

Owns:    the thread that hashes, what it needs of its own, and whether a digest counts.
Not:     what the digests are for (shared).
Holds:   what may change at any time is cloned before `begin` returns, what lies on a device is summed in its stream,
         behind the step before and ahead of the next one, and all else is hashed before an optimizer may change it: the
         gate waits for that, and helps. A leaf that changed all the same has no digest, never a wrong one. As with
         snapshots a digest counts only after a look that no change could hide from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from stepwell.events.run_events import logger
from stepwell.training.loop.waits import until
from stepwell.training.snapshot.guard import Guard
from stepwell.training.snapshot.quiet_moment import Between
from stepwell.training.state.device_sums import sums
from stepwell.training.state.fingerprint import content_digest
from stepwell.training.state.flatten import Leaf
from stepwell.training.state.roles import Role

_WHAT = "the end of a look at what the ranks hold"
_LOOK_SECONDS = 1.0
"""How often it is asked whether the training thread has ended."""
_END_SECONDS = 10.0


@dataclass
class Reading:
    """One moment of some leaves. Constructing only assigns.

    on_read:  called once, on the thread of this reading, with the digests by name, and the names of leaves that changed
    """

    on_read: Callable[[dict[str, str], list[str]], None]
    _digests: dict[str, str] = field(default_factory=dict)
    _sums: list[tuple[list[str], torch.Tensor]] = field(default_factory=list)
    _summed: list[torch.cuda.Event] = field(default_factory=list)
    _guard: Guard = field(default_factory=Guard)
    _left: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _open: int = 0
    _changed: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hashed: threading.Event = field(default_factory=threading.Event)
    _judged: threading.Event = field(default_factory=threading.Event)
    _is_dropped: bool = False
    _trainer: threading.Thread = field(default_factory=threading.current_thread)
    _thread: threading.Thread | None = None

    # -- the training thread ------------------------------------------------------------------------------------------

    def begin(self, leaves: Sequence[tuple[Leaf, Role]], restless: set[str]) -> None:
        """The leaves as they are now. No wait for a device, no hash here.

        restless:  leaves that changed under an earlier reading, whatever their role is
        """
        on_device = [leaf for leaf, _ in leaves if leaf.local.device.type != "cpu"]
        for batch, values in sums([leaf.local for leaf in on_device]):
            self._sums.append(([on_device[index].name for index in batch], values))
        for device in {leaf.local.device for leaf in on_device if leaf.local.device.type == "cuda"}:
            summed = torch.cuda.Event()
            summed.record(torch.cuda.current_stream(device))
            self._summed.append(summed)
        names, live = [], []
        for leaf, role in leaves:
            if leaf.local.device.type != "cpu":
                continue
            if role.protection == "loose" or leaf.name in restless:
                self._left.append((leaf.name, _cloned(leaf.local)))
            else:
                self._left.append((leaf.name, leaf.local))
                names.append(leaf.name)
                live.append(role.live)
        self._guard, self._open = Guard(names, live), len(self._left)
        if not names:
            self._judged.set()
        if not self._left:
            self._hashed.set()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stepwell-reading")
        self._thread.start()

    def gate(self) -> None:
        """Hold the optimizer back until everything it may change is hashed. Helps. Raises PersistError."""
        if self._judged.is_set():
            return
        self._help()
        until(self._hashed, _WHAT)
        self.look()

    def look(self) -> None:
        """The training thread is between two operations."""
        if self._hashed.is_set() and (threading.current_thread() is self._trainer or not self._trainer.is_alive()):
            self._judge()

    def drop(self) -> None:
        """Nobody wants the digests any more."""
        with self._lock:
            self._is_dropped = True
            self._left.clear()
        self._hashed.set()
        self._judged.set()

    def close(self) -> None:
        """Drop it, and wait for its thread to end."""
        self.drop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    # -- its own thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        between = Between()
        try:
            self._help()
            until(self._hashed, _WHAT)
            self._wait_for_look(between)
            for summed in self._summed:
                summed.synchronize()  # this thread has another stream than the one that sums
            for names, values in self._sums:
                self._digests.update(zip(names, (f"sum {value}" for value in values.tolist()), strict=True))
            if not self._is_dropped:
                changed = set(self._changed)
                found = {name: digest for name, digest in self._digests.items() if name not in changed}
                self.on_read(found, self._changed)
        except Exception:  # the other ranks wait until their deadline, or until rank 0 lets all look again
            logger.exception("cannot read the state of this rank")
        finally:
            between.close()
            self._sums, self._guard, self._left = [], Guard(), []  # let go of the user's tensors
            self.on_read = _nothing

    def _wait_for_look(self, between: Between) -> None:
        if self._judged.is_set():
            return
        if self._trainer is threading.main_thread() and between.wait(self._judged):
            self._judge()
        while not self._judged.wait(_LOOK_SECONDS):
            if not self._trainer.is_alive():
                self._judge()

    def _judge(self) -> None:
        with self._lock:
            if not self._judged.is_set():
                self._changed = self._guard.all_changed()
                self._judged.set()

    # -- both ---------------------------------------------------------------------------------------------------------

    def _help(self) -> None:
        """Hash what nobody hashes yet."""
        while True:
            with self._lock:
                if not self._left:
                    return
                name, tensor = self._left.pop()
            try:
                found = content_digest(tensor)
            except Exception:
                logger.exception("cannot read the state of this rank as %s", name)
                found = ""
            with self._lock:
                if found:
                    self._digests[name] = found
                self._open -= 1
                if not self._open:
                    self._hashed.set()


def _nothing(found: dict[str, str], changed: list[str]) -> None:
    """Nobody is told any more."""


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: not all types have a copy."""
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).clone() if plain.numel() else plain
