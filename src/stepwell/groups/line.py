"""Messages between rank 0 and the others at any time, while training runs. Nobody waits for them.

Owns:    the connections (a star around rank 0) and the one thread that reads and writes them.
Not:     what the messages mean; agreement of all ranks (group).
Holds:   `send` never waits for the network. Messages of one pair come in the order they were sent. A rank that is gone
         without having closed is reported once, after its last message. Callbacks run on the thread `stepwell-line`,
         also before `open` has returned.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from stepwell.errors import GroupError
from stepwell.events import logger
from stepwell.groups.group import Group, name_ranks
from stepwell.groups.meet import Guest, Place, call, listen
from stepwell.groups.wire import GOODBYE, Message, Wire, encode, prepare

_OPEN_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 1.0
_CLOSING_TICK_SECONDS: Final = 0.005
_OPENING: Final = "opening the line"


class Line:
    """One end of the star. With a group of one, everything here does nothing."""

    def __init__(
        self, group: Group, on_message: Callable[[int, Message], None], on_lost: Callable[[int], None]
    ) -> None:
        self._group = group
        self._on_message = on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._wires: dict[int, Wire] = {}
        self._unsent: set[int] = set()
        self._guests: set[Guest] = set()
        self._listener: socket.socket | None = None
        self._place: Place | None = None
        self._all_here = threading.Event()
        self._selector: selectors.BaseSelector | None = None
        self._bell = -1
        self._thread: threading.Thread | None = None
        self._close_by: float | None = None

    def open(self, seconds: float = _OPEN_SECONDS) -> None:
        """Connect. Collective: returns on all ranks when all are connected, or raises GroupError on all of them."""
        if self._group.size == 1:
            return
        try:
            missing = self._connect(seconds)
        except BaseException:
            self.close()
            raise
        if missing:
            self.close()
            raise GroupError(
                f"{name_ranks(sorted(missing))} could not connect to rank 0 within {seconds:g} s"
                f"{max(missing.values())}; a firewall, or a name that means another machine there: let MASTER_ADDR be "
                "an address of rank 0's machine that all others reach",
                missing=sorted(missing),
                operation=_OPENING,
            )

    def _connect(self, seconds: float) -> dict[int, str]:
        """Which ranks are not connected, and what they say about it: the same on all ranks."""
        group, deadline = self._group, time.monotonic() + seconds
        trouble: dict[str, str] = {}
        if group.is_leader:
            self._listener, self._place = listen(group.size, is_one_node=group.nodes == 1)
        plain = self._place.to_plain() if self._place else None
        place = Place.from_plain(group.broadcast(plain, f"{_OPENING}: where rank 0 listens", seconds))
        if group.is_leader:
            self._start()
            self._all_here.wait(max(0.0, deadline - time.monotonic()))
            trouble = {str(rank): "" for rank in range(1, group.size) if rank not in self._wires}
        else:
            try:
                self._wires[0] = Wire(call(place, group.rank, deadline), 0)
                self._start()
            except OSError as error:
                trouble = {str(group.rank): f" ({error})"}
        reports = group.all_gather(trouble, f"{_OPENING}: who is connected", seconds + _OPEN_SECONDS)
        return {int(rank): why for report in reports for rank, why in report.items()}

    def send(self, message: Message, to: int | None = None) -> None:
        """Queue a message and return: from rank 0 to one rank or to all, from the others to rank 0.

        What is sent to a rank that is gone, or after `close`, goes nowhere.
        """
        if to is not None and (to == 0) == self._group.is_leader:
            raise GroupError(
                f"rank {self._group.rank} has no line to rank {to}: only rank 0 and the others have",
                missing=[],
                operation="send",
            )
        frame = encode(message)
        with self._lock:
            if self._thread is None or self._close_by is not None:
                return
            for rank in self._wires if to is None else self._wires.keys() & {to}:
                self._wires[rank].push(frame)
                self._unsent.add(rank)
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Send what is queued, for up to 2 s, and end the thread. May be called twice, and in forked children."""
        with self._lock:
            thread = self._thread
            if thread is not None and self._close_by is None:
                self._close_by = time.monotonic() + _CLOSE_SECONDS
                for rank, wire in self._wires.items():
                    wire.push(GOODBYE)
                    self._unsent.add(rank)
                os.eventfd_write(self._bell, 1)
        if thread is None:
            self._let_go()
        elif thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS + _TICK_SECONDS)

    # The thread

    def _start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        for wire in self._wires.values():
            self._selector.register(wire.socket, selectors.EVENT_READ, wire)
        self._thread = threading.Thread(target=self._run, args=(self._selector,), daemon=True, name="stepwell-line")
        _open_lines.add(self)
        self._thread.start()

    def _run(self, selector: selectors.BaseSelector) -> None:
        while not self._is_done():
            for key, _ in selector.select(_TICK_SECONDS if self._close_by is None else _CLOSING_TICK_SECONDS):
                if isinstance(key.data, Wire):
                    self._read(selector, key.data)
                elif isinstance(key.data, Guest):
                    self._hear(selector, key.data)
                elif key.data is not None:
                    self._welcome(selector, key.data)
                else:
                    os.eventfd_read(self._bell)
            self._write(selector)
            self._drop_silent(selector)
        with self._lock:
            self._thread = None
            self._let_go()

    def _is_done(self) -> bool:
        if self._close_by is None:
            return False
        return time.monotonic() > self._close_by or all(wire.is_delivered() for wire in self._wires.values())

    def _read(self, selector: selectors.BaseSelector, wire: Wire) -> None:
        if self._wires.get(wire.rank) is not wire:
            return  # lost a moment ago, and still in this round of the selector
        try:
            for message in wire.receive():
                self._tell(self._on_message, wire.rank, message)
        except (OSError, ValueError, RecursionError) as error:
            self._lose(selector, wire, str(error))
            return
        if wire.has_left:
            self._remove(selector, wire)

    def _write(self, selector: selectors.BaseSelector) -> None:
        """Send what is queued. What a connection does not take now is sent when the selector says it does again."""
        with self._lock:
            unsent = [self._wires[rank] for rank in self._unsent if rank in self._wires]
            self._unsent.clear()
        for wire in unsent:
            try:
                with self._lock:
                    is_all = wire.flush()
                    if not is_all:
                        self._unsent.add(wire.rank)
            except OSError as error:
                self._lose(selector, wire, str(error))
                continue
            if wire.is_stuck():
                self._lose(selector, wire, "it does not read")
                continue
            wanted = selectors.EVENT_READ if is_all else selectors.EVENT_READ | selectors.EVENT_WRITE
            if selector.get_key(wire.socket).events != wanted:
                selector.modify(wire.socket, wanted, wire)

    def _lose(self, selector: selectors.BaseSelector, wire: Wire, why: str) -> None:
        self._remove(selector, wire)
        if self._close_by is None:
            logger.info("the line to rank %d is lost: %s", wire.rank, why)
            self._tell(self._on_lost, wire.rank)

    def _remove(self, selector: selectors.BaseSelector, wire: Wire) -> None:
        selector.unregister(wire.socket)
        with self._lock:
            del self._wires[wire.rank]
        wire.socket.close()

    def _tell(self, callback: Callable[..., None], *facts: object) -> None:
        try:
            callback(*facts)
        except Exception:
            logger.exception("a callback of the line failed; the line goes on")

    # Who calls rank 0

    def _welcome(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            if self._place is None or len(self._guests) > 2 * self._group.size:
                sock.close()
                return
            guest = Guest(sock, self._place.token)
            self._guests.add(guest)
            selector.register(sock, selectors.EVENT_READ, guest)
            guest.greet()

    def _hear(self, selector: selectors.BaseSelector, guest: Guest) -> None:
        if guest not in self._guests:
            return  # sent away a moment ago, and still in this round of the selector
        try:
            rank = guest.read()
        except OSError as error:
            logger.info("a connection to the line was refused: %s", error)
            self._dismiss(selector, guest)
            return
        if rank is None:
            return
        if rank in self._wires or not 0 < rank < self._group.size:
            self._dismiss(selector, guest)
            return
        self._guests.discard(guest)
        prepare(guest.socket)
        wire = Wire(guest.socket, rank)
        selector.modify(wire.socket, selectors.EVENT_READ, wire)
        with self._lock:
            self._wires[rank] = wire
        if len(self._wires) == self._group.size - 1:
            self._stop_listening(selector)
            self._all_here.set()

    def _dismiss(self, selector: selectors.BaseSelector, guest: Guest) -> None:
        self._guests.discard(guest)
        selector.unregister(guest.socket)
        guest.socket.close()

    def _drop_silent(self, selector: selectors.BaseSelector) -> None:
        for guest in [guest for guest in self._guests if time.monotonic() > guest.deadline]:
            self._dismiss(selector, guest)

    def _stop_listening(self, selector: selectors.BaseSelector) -> None:
        if self._listener is not None:
            selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for guest in list(self._guests):
            self._dismiss(selector, guest)

    # The end

    def _let_go(self) -> None:
        """Close this process's descriptors. In a forked child that leaves the parent's connections as they are."""
        sockets = [wire.socket for wire in self._wires.values()] + [guest.socket for guest in self._guests]
        for sock in sockets:
            sock.close()
        self._wires, self._guests = {}, set()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _forget(self) -> None:
        """In a forked child: there is no thread here, and the lock may be held by one that is not here."""
        self._lock = threading.Lock()
        self._thread = None
        self._let_go()


# A child that kept the connections would keep the others from noticing that this process is gone.
_open_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _forget_in_child() -> None:
    for line in list(_open_lines):
        line._forget()


os.register_at_fork(after_in_child=_forget_in_child)
