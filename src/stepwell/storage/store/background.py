"""Threads that work beside training: last in line for the processor, and patient with a place that fails.

Owns:    their priority, and how long they wait before they try again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Final

NICE: Final = 10
_RETRY_SECONDS: Final = (0.5, 1, 2, 5, 10, 30)
_QUICK_SECONDS: Final = (0.1, 0.2, *_RETRY_SECONDS)


def lower_priority() -> None:
    """On Linux the calling thread's alone: training and the node's own disk come first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def retry_seconds(failures: int, *, is_quick: bool = False) -> float:
    """How long to wait after a failure that had so many before it. `is_quick`: at first hardly at all."""
    ladder: Sequence[float] = _QUICK_SECONDS if is_quick else _RETRY_SECONDS
    return ladder[min(failures, len(ladder) - 1)]
