"""How often agents died lately, and how long to wait before another one is started.

Holds:   the first few are replaced at once. After that the pauses grow, up to five minutes, until a checkpoint is
         durable: whatever kills agents may pass, and a run without checkpoints is worse than one more try.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import ClassVar, Final

from stepwell.events.run_events import Event
from stepwell.handover.message import ToTrainer
from stepwell.handover.protocol import Begin, NoPart, Released, WriteFailed

_MOST_PER_MINUTE: Final = 5
_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class AgentsFail(Event):
    """Agents die again and again. What they were to write is given up: it may be what kills them."""

    level: ClassVar[int] = logging.ERROR
    deaths: int
    given_up: int
    seconds: float

    def text(self) -> str:
        return f"{self.reason()}; starting another one in {self.seconds:.0f} s"

    def reason(self) -> str:
        """Without what comes next."""
        return (
            f"the agent died {self.deaths} times within a minute (see its errors above); dropping what it had to write"
        )


class Deaths:
    """Of one trainer's agents."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._pauses = 0

    def note(self) -> float:
        """One more. Returns the seconds to wait."""
        now = time.monotonic()
        self._at = [at for at in self._at if now - at < 60] + [now]
        if len(self._at) <= _MOST_PER_MINUTE:
            return 0.0
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._pauses, 60))
        self._pauses += 1
        self._at = [now + pause] * _MOST_PER_MINUTE  # the next one soon after the pause is one too many again
        return pause

    def note_durable(self) -> None:
        """Something was written."""
        self._at, self._pauses = [], 0

    @property
    def count(self) -> int:
        """How many are one too many."""
        return _MOST_PER_MINUTE + 1


def given_up(begun: Begin, lineage: int, error: str) -> list[ToTrainer]:
    """What an agent would have said of a snapshot that it gives up."""
    return [
        WriteFailed(begun.sequence, begun.request.step, lineage, error, final=True),
        Released(begun.sequence, is_over=True),
    ]


def void_of(begun: Begin, reason: str) -> NoPart:
    """What the other ranks are to hear of it."""
    return NoPart(begun.request.step, begun.request.repeat, reason)
