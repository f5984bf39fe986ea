"""What other threads tell the training thread, which takes it where it decides what is due.

Owns:    the notices, in the order they came.
Not:     what can be done at once, from any thread: slots that are released, futures that are decided.
Holds:   any thread posts, and none waits; the training thread alone takes, so it alone owns what a notice changes. A
         snapshot leads to a few notices, and only the training thread takes snapshots: they are few while it is busy.
         No lock: the interpreter may call us in the main thread while that thread is in here.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class Again(enum.Enum):
    """Why a checkpoint is wanted, whatever the policy says."""

    VOID = "the snapshot before was void"
    BASE = "a chain of lossy records needs a base"
    LOSSY = "the run resumed from a lossy state"
    CHANGED = "the code between epochs changed the state, and the other ranks may not know"


@dataclass(frozen=True)
class WantAgain:
    """A checkpoint is wanted."""

    reason: Again


@dataclass(frozen=True)
class Drifted:
    """What the ranks share is no longer the same on all of them: they have to look again."""


Notice = WantAgain | Drifted


class Mailbox:
    """Notices for the training thread of one run."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque()

    def post(self, notice: Notice) -> None:
        """Any thread."""
        self._notices.append(notice)

    def take(self) -> list[Notice]:
        """All that came since the last time. The training thread only."""
        taken = []
        while self._notices:
            taken.append(self._notices.popleft())
        return taken
