"""Who asks this agent for the memory of its dead trainer.

Owns:    the socket where successors and other ranks call, and who of the callers is heard.
Not:     what they are answered (process), the name of the socket (arena.address).
Holds:   callers of other users are sent away before anything of theirs is read, many in one round, so that they keep
         nobody out for long. An agent that cannot listen goes on without: a restart then continues from disk.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Final

from stepwell.events import run_events
from stepwell.handover.agent_address import listen
from stepwell.handover.channel import Channel, is_same_user

_MOST: Final = 256
"""In one round; then the trainer is heard again."""
_SECONDS: Final = 10.0


class Callers:
    """Constructing only assigns."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, where: str, rank: int, selector: selectors.BaseSelector, then: Callable[[], None]) -> bool:
        """Let successors call from now on, once. False: they cannot, and a line says so. `where`: empty if nowhere."""
        if self._listener is not None or not where:
            return self._listener is not None
        try:
            self._listener = listen(where, rank)
        except OSError as error:
            run_events.logger.warning(
                "cannot listen for the next trainer (%s): after a crash of this one, the next start continues from "
                "disk, not from memory",
                error,
            )
            return False
        selector.register(self._listener, selectors.EVENT_READ, then)
        return True

    def take(self) -> Iterator[Channel]:
        """Those of this user who wait now. Each waits for `_SECONDS` at most to be heard and answered."""
        assert self._listener is not None
        for _ in range(_MOST):
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody any more, or no descriptors left: the rest waits
                return
            if is_same_user(sock):
                sock.settimeout(_SECONDS)
                yield Channel(sock)
            else:
                sock.close()
