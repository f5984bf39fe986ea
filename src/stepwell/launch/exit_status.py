"""How an agent of torchrun ends when the job cannot go on: one exit status for each thing a scheduler may do next.

Holds:   `LaunchEnded` is a SystemExit, raised in the agent's main thread: torchrun ends the workers on its way out and
         does not turn it into status 1, as it does with every other exception.
"""

from __future__ import annotations

from typing import Final

from stepwell.training.loop.preemption import REQUEUE

DONE: Final = 0
FAILED: Final = 1
"""The script itself failed: an agent used up torchrun's --max-restarts, or the call cannot work."""
STORE_LOST: Final = 69
"""The store is gone or cannot be reached. The job may be started again."""
OUT_OF_SPARES: Final = 76
"""Slots without a node, and nobody came to take them."""
QUARANTINED: Final = 77
"""This node may not take part; the job goes on without it."""
OUT_OF_RESTARTS: Final = 78
"""The job's budget of restarts is used up: do not start it again before somebody has looked."""

__all__ = ["DONE", "FAILED", "OUT_OF_RESTARTS", "OUT_OF_SPARES", "QUARANTINED", "REQUEUE", "STORE_LOST", "LaunchEnded"]


class LaunchEnded(SystemExit):
    """The agent ends with this status; `reason` is the one line that was printed."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason
