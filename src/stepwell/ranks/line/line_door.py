"""Where a rank is called by those below it on the line: who has proved to be one of them is let in, once.

Owns:    the listening socket, and callers that have proved nothing yet.
Not:     the proof (trust.greeting), what is said afterwards (wire, hub).
Holds:   nobody without the run's key is let in, and no rank in the place of another. Silent callers keep no rank out,
         since the oldest has to go. Nothing here blocks; one thread uses it: the line's.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Container
from typing import Final

from stepwell.events.run_events import logger
from stepwell.ranks.line.line_connection import Wire, prepare
from stepwell.ranks.line.line_meeting import rank_of, receive_guest
from stepwell.ranks.wire.greeting import Guest, Terms

_LEAST_GUESTS: Final = 16
"""Callers that have proved nothing yet, or twice the ranks that may call: the oldest has to go when one more comes."""


class LineDoor:
    """Of one rank. Registers with `selector`: the listener with itself as data, callers with their guest."""

    def __init__(
        self, selector: selectors.BaseSelector, listener: socket.socket, terms: Terms, ranks: frozenset[int]
    ) -> None:
        self._selector, self._listener, self._terms, self._ranks = selector, listener, terms, ranks
        self._guests: dict[Guest, None] = {}  # in the order they came
        self.is_open = True

    def open(self) -> None:
        """Begin to listen."""
        self._selector.register(self._listener, selectors.EVENT_READ, self)

    def welcome(self, inside: Container[int]) -> list[Wire]:
        """Take who calls; who of them is known already."""
        most = max(_LEAST_GUESTS, 2 * len(self._ranks))
        known = []
        for _ in range(most if self.is_open else 0):  # then those inside are heard again
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody any more, or no descriptors left
                break
            if len(self._guests) >= most:
                self._dismiss(next(iter(self._guests)))
            guest = receive_guest(sock, self._terms)
            self._guests[guest] = None
            self._selector.register(sock, selectors.EVENT_READ, guest)
            known.append(self.hear(guest, inside))
        return [wire for wire in known if wire is not None]

    def hear(self, guest: Guest, inside: Container[int]) -> Wire | None:
        """Go on with one; its wire, once it has proved to be a rank that may call and is not `inside` already."""
        if guest not in self._guests:
            return None  # sent away a moment ago, and still in this round of the selector
        try:
            if not guest.advance():
                return None
        except OSError as error:
            logger.info("a connection to the line was refused: %s", error)
            self._dismiss(guest)
            return None
        rank = rank_of(guest)
        if guest.seals is None or rank in inside or rank not in self._ranks:
            self._dismiss(guest)
            return None
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        prepare(guest.socket)
        return Wire(guest.socket, rank, guest.seals)

    def drop_silent(self) -> None:
        """Send away who has not proved anything within its time."""
        for guest in [guest for guest in self._guests if time.monotonic() > guest.deadline]:
            self._dismiss(guest)

    def close(self) -> None:
        """Listen no more."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._listener)
            for guest in list(self._guests):
                self._dismiss(guest)
            self._listener.close()

    def let_go(self) -> None:
        """Close this process's descriptors, and leave the selector as it is: in a forked child it is the parent's."""
        self._listener.close()
        for guest in self._guests:
            guest.socket.close()

    def _dismiss(self, guest: Guest) -> None:
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        guest.socket.close()
