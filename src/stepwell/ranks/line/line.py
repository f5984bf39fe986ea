"""Messages between rank 0 and the others at any time, while training runs. Nobody waits for them.

Owns:    the one thread that reads and writes, and how it is spoken to from others; finding each other.
Not:     what the messages mean; connections and ways (hub, tree); agreement of all ranks (group); the greeting and the
         tags of messages (trust).
Holds:   `send` never waits for the network. Messages of one pair come in the order they were sent. Rank 0 hears of a
         rank that is gone without having closed once, after its last message; the others hear it of rank 0, or of the
         first rank of their node, by whom everything goes: behind one that is gone nobody can be reached, and after
         one that has closed nobody is. Nobody without the run's key is let in, or says or changes a message. Callbacks
         run on the thread `stepwell-line`, also before `open` has returned.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from stepwell.errors import GroupError
from stepwell.ranks.groups.group import Group, name_ranks
from stepwell.ranks.line.line_connection import Wire
from stepwell.ranks.line.line_door import LineDoor
from stepwell.ranks.line.line_frame import ALL, Message, encode
from stepwell.ranks.line.line_hub import CLOSE_SECONDS, TICK_SECONDS, Hub, Letter
from stepwell.ranks.line.line_meeting import LineAddress, call, listen
from stepwell.ranks.line.line_tree import Tree, parents

_OPEN_SECONDS: Final = 60.0
_OPENING: Final = "opening the line"


class Line:
    """One end. With a group of one, everything here does nothing."""

    def __init__(
        self, group: Group, key: bytes, on_message: Callable[[int, Message], None], on_lost: Callable[[int], None]
    ) -> None:
        """`key`: the run's, the same on all ranks, which has not come over the group."""
        self._group, self._key = group, key
        self._hub = Hub(Tree(group.rank, group.node_of), on_message, on_lost)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._orders: list[Callable[[], None]] = []
        """For the thread, in order."""
        self._thread: threading.Thread | None = None
        self._is_closing = False

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
                f"{_what_failed(missing, seconds, self._group.node_of)}; a firewall, or a name that means another "
                "machine there: let MASTER_ADDR be an address of rank 0's machine that all others reach, and "
                "STEPWELL_NODE, if set, differ between machines and containers",
                missing=sorted(missing),
                operation=_OPENING,
            )

    def _connect(self, seconds: float) -> dict[int, str]:
        """Which ranks are not connected, and what they say about it: the same on all ranks."""
        group, deadline = self._group, time.monotonic() + seconds
        hub, tree = self._hub, self._hub.tree
        mine: Any = None
        if tree.children:
            self._listener, place = listen(is_for_node=group.nodes == 1 or not group.is_leader)
            mine = place.to_plain() if group.is_leader else place.port
        told = group.all_gather(mine, f"{_OPENING}: who listens where", seconds)
        top = LineAddress.from_plain(told[0])
        all_here = threading.Event()
        selector = hub.start()
        if self._listener is not None:
            hub.listen(LineDoor(selector, self._listener, top.terms(self._key), tree.children), all_here.set)
        self._start(hub)
        trouble: dict[str, str] = {}
        if tree.parent is not None:
            above = top if tree.parent == 0 else top.beside(told[tree.parent])
            try:
                sock, seals = call(above, self._key, group.rank, deadline)
            except OSError as error:
                trouble[str(group.rank)] = f" ({error})"
            else:
                self._join(Wire(sock, tree.parent, seals))
        if tree.children and not all_here.wait(max(0.0, deadline - time.monotonic())):
            trouble |= {str(rank): "" for rank in tree.children if rank not in hub.wires}
        reports = group.all_gather(trouble, f"{_OPENING}: who is connected", seconds + _OPEN_SECONDS)
        missing: dict[int, str] = {}
        for report in reports:
            missing |= {int(rank): why for rank, why in report.items() if why or int(rank) not in missing}
        return missing

    def _join(self, wire: Wire) -> None:
        """Hand the connection over. Before the others hear of it: what they send may have to go up by it at once."""
        is_in = threading.Event()

        def add() -> None:
            self._hub.add(wire)
            is_in.set()

        self._order(add)
        is_in.wait(_OPEN_SECONDS)

    def send(self, message: Message, to: int | None = None) -> None:
        """Queue a message and return: from rank 0 to one rank or to all, from the others to rank 0.

        What is sent to a rank that is gone, or after `close`, goes nowhere. Raises GroupError if it is too long.
        """
        frame = encode(message, self._rank_of(to))
        self._post(Letter(lambda: frame, lambda error: None))

    def send_large(self, message: Message, on_refused: Callable[[GroupError], None], to: int | None = None) -> None:
        """The same for one that takes long to encode: the line's thread does it. Nobody may change it any more.

        on_refused:  told that it is too long, on that thread
        """
        self._post(Letter(partial(encode, message, self._rank_of(to)), on_refused))

    def _rank_of(self, to: int | None) -> int:
        if to is not None and (to == 0) == self._group.is_leader:
            raise GroupError(
                f"rank {self._group.rank} has no line to rank {to}: only rank 0 and the others have",
                missing=[],
                operation="send",
            )
        return (ALL if to is None else to) if self._group.is_leader else self._group.rank

    def _post(self, letter: Letter) -> None:
        self._order(partial(self._hub.post, letter))

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is not None and not self._is_closing:
                self._orders.append(order)
                os.eventfd_write(self._hub.bell, 1)

    def close(self) -> None:
        """Send what is queued, for up to 2 s, and end the thread. May be called twice, and in forked children.

        The first rank of a node also passes on what the others there have queued, within the same time.
        """
        with self._lock:
            thread = self._thread
            if thread is not None and not self._is_closing:
                self._is_closing = True
                self._orders.append(self._hub.close)
                os.eventfd_write(self._hub.bell, 1)
        if thread is None:
            self._let_go()
        elif thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS + TICK_SECONDS)

    # The thread

    def _start(self, hub: Hub) -> None:
        self._thread = threading.Thread(target=self._run, args=(hub,), daemon=True, name="stepwell-line")
        _open_lines.add(self)
        self._thread.start()

    def _run(self, hub: Hub) -> None:
        while not hub.is_over():
            hub.turn()
            with self._lock:
                orders, self._orders = self._orders, []
            for order in orders:
                order()
            hub.flush()
        with self._lock:
            self._thread = None
            self._let_go()

    def _let_go(self) -> None:
        self._hub.let_go()
        if self._listener is not None:
            self._listener.close()

    def _forget(self) -> None:
        """In a forked child: there is no thread here, and the lock may be held by one that is not here."""
        self._lock = threading.Lock()
        self._thread = None
        self._let_go()


def _what_failed(missing: dict[int, str], seconds: float, node_of: list[int]) -> str:
    """Who could not connect to whom."""
    up = parents(node_of)
    above: dict[int, list[int]] = {}
    for rank in sorted(missing):
        above.setdefault(up[rank], []).append(rank)
    return "; ".join(
        f"{name_ranks(ranks)} could not connect to rank {parent} within {seconds:g} s"
        f"{max(missing[rank] for rank in ranks)}"
        for parent, ranks in above.items()
    )


# A child that kept the connections would keep the others from noticing that this process is gone.
_open_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _forget_in_child() -> None:
    for line in list(_open_lines):
        line._forget()


os.register_at_fork(after_in_child=_forget_in_child)
