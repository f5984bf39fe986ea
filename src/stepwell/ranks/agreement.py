"""When all ranks checkpoint: the same steps everywhere, and no step waits to find out.

Owns:    the plans: rank 0 names a step that lies ahead, the others hear of it on their way there.
Not:     whether a checkpoint is due (policy), and what cannot be known everywhere alone: a policy that counts steps
         needs no word, all ranks count alike.
Holds:   a rank that hears of a step it has passed says so, and that checkpoint is void for all: nothing is ever
         half there, and nobody has waited. The next plan looks further ahead.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

Message = dict[str, Any]
_AHEAD_SECONDS: Final = 0.05
"""How far ahead a plan is made at first."""
_AHEAD_STEPS: Final = 2
_MOST_SECONDS: Final = 30.0


class Action(enum.Enum):
    """What is to be done after a step. The value is what ranks send."""

    SAVE = "save"
    MEMORY = "memory"
    LOOK_AGAIN = "look again"
    LEAVE = "leave"


_NO_MEMORY: Final = (Action.LEAVE, Action.LOOK_AGAIN)
"""Plans that do not wait until all ranks have memory for snapshots."""


class Agreement:
    """Plans of one rank. `send` hands a message to rank 0, or from there to all; it never waits.

    on_late:  told a step that was to be saved and is passed already; called on the thread that brings messages
    """

    def __init__(self, rank: int, size: int, send: Callable[[Message], None], on_late: Callable[[int], None]) -> None:
        self._is_leader = rank == 0
        self._size = size
        self._send = send
        self._on_late = on_late
        self._lock = threading.Lock()
        self._plans: dict[int, Action] = {}
        self._passed = 0
        self._ahead = _AHEAD_SECONDS
        self._furthest = 0
        self._pace = 0.0
        self._at: float | None = None
        self._ready: set[int] = set()
        self._is_ready: bool | None = None
        self._has_asked = False

    # -- the training thread ------------------------------------------------------------------------------------------

    def pass_step(self, step: int, *, wishes: Iterable[Action] = ()) -> set[Action]:
        """A step is over: what was planned for it. Rank 0 plans what is wished for."""
        now = time.monotonic()
        if self._at is not None:
            self._pace = now - self._at if not self._pace else 0.9 * self._pace + 0.1 * (now - self._at)
        self._at = now
        with self._lock:
            self._passed = step
            for wish in wishes if self._is_leader else ():
                self._plan(wish, step)
            due = {what for at, what in self._plans.items() if at == step}
            self._plans = {at: what for at, what in self._plans.items() if at > step}
        return due

    def _plan(self, what: Action, step: int) -> None:
        """At most one plan at a time, but for leaving, which cannot wait."""
        if self._plans and (what is not Action.LEAVE or Action.LEAVE in self._plans.values()):
            return
        if what not in _NO_MEMORY and len(self._ready) < self._size:
            return
        ahead = max(_AHEAD_STEPS, math.ceil(self._ahead / self._pace) if self._pace else _AHEAD_STEPS)
        at = max(step, self._furthest) + ahead
        while at in self._plans:
            at += 1
        self._plans[at] = what
        self._send({"type": "plan", "step": at, "what": what.value})

    def ask_to_leave(self) -> None:
        """This rank was told to go: so are all."""
        if not self._is_leader and not self._has_asked:
            self._has_asked = True
            self._send({"type": "leave"})

    def tell_ready(self, is_ready: bool) -> None:
        """Whether this rank has memory for snapshots: plans wait until all have."""
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        if self._is_leader:
            self._note_ready(0, is_ready)
        else:
            self._send({"type": "ready", "is_ready": is_ready})

    # -- the thread that brings messages ------------------------------------------------------------------------------

    def on_message(self, rank: int, message: Message) -> None:
        """A message of this module."""
        if message["type"] == "plan":
            self._hear(message["step"], Action(message["what"]))
        elif message["type"] == "late":
            with self._lock:
                self._furthest = max(self._furthest, message["step"])
                self._ahead = min(_MOST_SECONDS, 2 * self._ahead)
        elif message["type"] == "ready":
            self._note_ready(rank, message["is_ready"])

    def _hear(self, step: int, what: Action) -> None:
        with self._lock:
            passed = self._passed
            if step > passed or what is Action.LEAVE:
                self._plans[max(step, passed + 1)] = what  # where the others go this rank cannot stay
        if step <= passed:
            self._send({"type": "late", "step": passed})
            if what is Action.SAVE:
                self._on_late(step)

    def _note_ready(self, rank: int, is_ready: bool) -> None:
        with self._lock:
            (self._ready.add if is_ready else self._ready.discard)(rank)
