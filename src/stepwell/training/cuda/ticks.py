"""How long iterations take: by the host's clock, or by the device's own where a device does the work.

Owns:    the marks between iterations. On CUDA the host runs ahead, and only events on the stream tell the truth; they
         are read when the device has passed them, so nothing waits.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, TypeVar

import torch

Note = TypeVar("Note")
_MOST_WAITING = 1024


class Ticks(Generic[Note]):
    """Marks the ends of iterations. Each comes back with its duration and the note it was given, in order."""

    def __init__(self) -> None:
        self._mark: Any = None
        self._waiting: deque[tuple[Any, Any, Note]] = deque(maxlen=_MOST_WAITING)

    def skip(self) -> None:
        """What runs now is no iteration of the loop."""
        self._mark = None

    def tick(self, note: Note) -> list[tuple[float, Note]]:
        """An iteration is over. Returns those whose duration is known by now."""
        before, self._mark = self._mark, _now()
        if before is not None and type(before) is type(self._mark):
            self._waiting.append((before, self._mark, note))
        found = []
        while self._waiting and _is_past(self._waiting[0][1]):
            start, end, noted = self._waiting.popleft()
            found.append((_between(start, end), noted))
        return found


def _now() -> Any:
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.monotonic()


def _is_past(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(end, float) else float(start.elapsed_time(end)) / 1e3


def device_name() -> str:
    """The device that does the work."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"
