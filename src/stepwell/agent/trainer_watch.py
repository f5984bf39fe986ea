"""The process whose snapshots an agent holds, seen through a pidfd.

Owns:    the pidfd, and its place in the agent's selector.
Holds:   a process that is gone already is seen to be gone; nobody raises for it.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable


class Watched:
    """At most one process at a time. `pid` is 0 while there is none."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._fd = -1
        self.pid = 0

    @property
    def is_there(self) -> bool:
        """Whether its end is still to come."""
        return self._fd >= 0

    def watch(self, pid: int, on_end: Callable[[], None]) -> bool:
        """From now on this one. False: it is gone already, and `on_end` will not be called."""
        self.forget()
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._selector.register(self._fd, selectors.EVENT_READ, on_end)
        return True

    def forget(self) -> None:
        """None any more."""
        if self._fd >= 0:
            self._selector.unregister(self._fd)
            os.close(self._fd)
        self._fd, self.pid = -1, 0
