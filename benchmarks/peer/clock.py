"""When iterations ended, on one time axis: the host's monotonic clock.

On CUDA the end of an iteration is an event on the compute stream, so host time that the device does not see stays
hidden, as it does for a user. The host runs at most one iteration ahead, as a loop does that prints the last loss.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Ends of iterations. `mark` never waits for the running iteration."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._host: list[float] = []
        self._events: list[Any] = []
        self._origin: tuple[float, Any] | None = None
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            event.record()
            event.synchronize()
            self._origin = (time.monotonic(), event)

    def __len__(self) -> int:
        return len(self._host)

    def mark(self) -> None:
        """The iteration is over, as far as the host is concerned."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
            if len(self._events) > 1:
                self._events[-2].synchronize()
        self._host.append(time.monotonic())

    def ends(self) -> list[float]:
        """Ends of all iterations, on the device's side where there is one."""
        if self._origin is None:
            return list(self._host)
        torch.cuda.synchronize()
        start, origin = self._origin
        return [start + origin.elapsed_time(event) / 1e3 for event in self._events]
