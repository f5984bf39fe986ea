"""What the line's thread does at one rank: frames in, on their way, and out; who is lost, and who has left.

    rank -> its node's first rank -> rank 0, and back; the first ranks pass frames on as they are, with new tags

Owns:    the connections of this rank, and where a frame goes next.
Not:     the thread and who talks to it from outside (line), who may connect (door), one connection (wire).
Holds:   a frame that comes up is of the rank that sent it or of one of its node, or the connection is lost. Rank 0
         hears of each rank that is gone without having closed once, after its last message; the other ranks, that
         they are cut off. Where rank 0 reads slowly, ranks that pass frames on read slowly too: what waits is bounded.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from stepwell.errors import DamagedError, GroupError
from stepwell.events.run_events import logger
from stepwell.ranks.line.line_connection import Wire
from stepwell.ranks.line.line_door import LineDoor
from stepwell.ranks.line.line_frame import ALL, GOODBYE, Kind, LineFrame, Message, word
from stepwell.ranks.line.line_tree import Tree
from stepwell.ranks.wire.greeting import Guest

CLOSE_SECONDS: Final = 2.0
TICK_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = CLOSE_SECONDS / 2
"""Of these, for what the ranks of the node have queued when their first rank closes."""
_CLOSING_TICK_SECONDS: Final = 0.005


@dataclass(frozen=True)
class Letter:
    """What is to be sent: made and routed on the line's thread."""

    make: Callable[[], LineFrame]
    on_refused: Callable[[GroupError], None]


class Hub:
    """Of one rank. All methods are the line's thread's, but `start`, and `let_go` where there is none."""

    def __init__(self, tree: Tree, on_message: Callable[[int, Message], None], on_lost: Callable[[int], None]) -> None:
        self.tree = tree
        self.wires: dict[int, Wire] = {}
        self.selector: selectors.BaseSelector | None = None
        self.bell = -1
        self._on_message, self._on_lost = on_message, on_lost
        self._door: LineDoor | None = None
        self._on_all_here: Callable[[], None] = lambda: None
        self._unsent: set[int] = set()
        self._gone: set[int] = set()
        """On rank 0: who has closed or is lost."""
        self._is_cut_off = False
        """On the others: rank 0, or who leads there, has closed or is lost."""
        self._is_muted = False
        self._close_by: float | None = None

    def start(self) -> selectors.BaseSelector:
        """Make what a thread needs to wait in."""
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(self.bell, selectors.EVENT_READ)
        return self.selector

    def listen(self, door: LineDoor, on_all_here: Callable[[], None]) -> None:
        """Let those below call; tell when all have, and listen no more."""
        self._door, self._on_all_here = door, on_all_here
        door.open()

    # The loop

    def turn(self) -> None:
        """Wait for something to happen, for up to a second, and do what follows from it."""
        assert self.selector is not None
        is_called = False
        for key, _ in self.selector.select(TICK_SECONDS if self._close_by is None else _CLOSING_TICK_SECONDS):
            if isinstance(key.data, Wire):
                self._read(key.data)
            elif isinstance(key.data, Guest):
                self._admit([self._door.hear(key.data, self.wires)] if self._door else [])
            elif isinstance(key.data, LineDoor):
                is_called = True
            else:
                os.eventfd_read(self.bell)
        if self._door is not None and is_called:
            # Last: somebody who has just answered is not pushed out by who has just come.
            self._admit(self._door.welcome(self.wires))
        if self._door is not None:
            self._door.drop_silent()

    def is_over(self) -> bool:
        """Closing, and all is with the other machines, or the time for it is over."""
        if self._close_by is None:
            return False
        if time.monotonic() > self._close_by:
            return True
        return all(wire.is_leaving and wire.is_delivered() for wire in self.wires.values())

    def close(self) -> None:
        """Say goodbye, and be over soon."""
        self._close_by = time.monotonic() + CLOSE_SECONDS

    def add(self, wire: Wire) -> None:
        """A connection whose other end is known."""
        self.wires[wire.rank] = wire
        self._watch(wire)

    def post(self, letter: Letter) -> None:
        """Make a frame, and put it in line: for one rank or all on rank 0, for rank 0 on the others."""
        try:
            frame = letter.make()
        except GroupError as error:
            logger.error("a message was not sent: %s", error)
            self._tell(letter.on_refused, error)
            return
        if self.tree.parent is not None:
            self._push([self.tree.parent], frame)
        elif frame.rank == ALL:
            self._push(list(self.wires), frame)
        else:
            self._push([self.tree.way_to(frame.rank)], frame)

    def flush(self) -> None:
        """Send what waits. What a connection does not take now is sent when the selector says it does again."""
        if self._close_by is not None:
            self._say_goodbye(self._close_by)
        for wire in [self.wires[rank] for rank in self._unsent if rank in self.wires]:
            try:
                if wire.flush():
                    self._unsent.discard(wire.rank)
            except OSError as error:
                self._read(wire)  # its last words may be there
                self._lose(wire, str(error))
                continue
            if wire.is_stuck():
                self._lose(wire, "it does not read")
                continue
            self._watch(wire)
        self._mute()

    def let_go(self) -> None:
        """Close this process's descriptors. In a forked child that leaves the parent's connections as they are."""
        for wire in self.wires.values():
            wire.socket.close()
        self.wires = {}
        if self._door is not None:
            self._door.let_go()
            self._door = None
        if self.selector is not None:
            self.selector.close()
            self.selector = None
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1

    # What comes in

    def _read(self, wire: Wire) -> None:
        if self.wires.get(wire.rank) is not wire:
            return  # lost a moment ago, and still in this round of the selector
        try:
            for frame in wire.receive():
                if wire.rank == self.tree.parent:
                    self._take_from_above(frame)
                elif self.tree.parent is None:
                    self._take_at_the_top(wire, frame)
                else:
                    self._pass_up(wire, frame)
        except (OSError, ValueError, RecursionError, DamagedError) as error:
            self._lose(wire, str(error))
            return
        if wire.has_left:
            self._part(wire)

    def _take_from_above(self, frame: LineFrame) -> None:
        if frame.kind == Kind.LOST:
            self._be_cut_off(frame.rank)
            return
        if frame.rank == ALL:
            self._push(self.tree.children, frame)
        elif frame.rank in self.tree.children:
            self._push([frame.rank], frame)
            return
        elif frame.rank != self.tree.rank:
            raise ValueError(f"a message for rank {frame.rank} came to rank {self.tree.rank}")
        self._tell(self._on_message, 0, frame.message())

    def _pass_up(self, wire: Wire, frame: LineFrame) -> None:
        if frame.kind != Kind.MESSAGE or frame.rank != wire.rank:
            raise ValueError(f"rank {wire.rank} speaks for rank {frame.rank}")
        self._push([self.tree.parent], frame)

    def _take_at_the_top(self, wire: Wire, frame: LineFrame) -> None:
        rank = frame.rank
        if rank not in self.tree.behind(wire.rank):
            raise ValueError(f"rank {wire.rank} speaks for rank {rank}, which is not of its node")
        if rank in self._gone:
            return
        if frame.kind == Kind.LEFT:
            self._gone.add(rank)
        elif frame.kind == Kind.LOST:
            self._miss([rank], "its node's first rank lost it")
        else:
            try:
                message = frame.message()
            except (ValueError, RecursionError) as error:
                if rank == wire.rank:
                    raise
                self._miss([rank], str(error))  # of the one that says it, and not of who passes it on
                return
            self._tell(self._on_message, rank, message)

    def _admit(self, wires: Iterable[Wire | None]) -> None:
        for wire in wires:
            if wire is not None:
                self.add(wire)
        if self._door is not None and self.tree.children <= self.wires.keys():
            self._door.close()
            self._door = None
            self._on_all_here()

    # Who is gone

    def _part(self, wire: Wire) -> None:
        """It has said goodbye."""
        if wire.rank == self.tree.parent:
            self._is_cut_off = True
            if wire.rank != 0:
                self._push([wire.rank], GOODBYE)  # it waits for what is queued here, and hangs up then
                return
            self._push(self.tree.children, GOODBYE)
        elif self.tree.parent is None:
            self._gone |= self.tree.behind(wire.rank)
        else:
            self._push([self.tree.parent], word(Kind.LEFT, wire.rank))
        self._remove(wire)

    def _lose(self, wire: Wire, why: str) -> None:
        if self.wires.get(wire.rank) is not wire:
            return
        self._remove(wire)
        if wire.rank == self.tree.parent:
            if not wire.is_leaving:
                logger.info("the line to rank %d is lost: %s", wire.rank, why)
                self._be_cut_off(wire.rank)
        elif self.tree.parent is None:
            self._miss([wire.rank, *sorted(self.tree.behind(wire.rank) - {wire.rank})], why)
        else:
            self._push([self.tree.parent], word(Kind.LOST, wire.rank))

    def _miss(self, ranks: list[int], why: str) -> None:
        """On rank 0: these are gone without having closed."""
        for rank in ranks:
            if rank not in self._gone and self._close_by is None:
                logger.info("the line to rank %d is lost: %s", rank, why)
                self._tell(self._on_lost, rank)
            self._gone.add(rank)

    def _be_cut_off(self, rank: int) -> None:
        """Not on rank 0: `rank`, by whom everything went, is gone without having closed."""
        self._push(self.tree.children, word(Kind.LOST, rank))
        self._push(self.tree.children, GOODBYE)
        if not self._is_cut_off and self._close_by is None:
            self._tell(self._on_lost, rank)
        self._is_cut_off = True

    def _remove(self, wire: Wire) -> None:
        assert self.selector is not None
        if wire.socket in self.selector.get_map():
            self.selector.unregister(wire.socket)
        del self.wires[wire.rank]
        self._unsent.discard(wire.rank)
        wire.socket.close()

    def _say_goodbye(self, close_by: float) -> None:
        """To those below at once. To the one above when these have answered: it may have to pass on what they sent."""
        below = self.wires.keys() & self.tree.children
        self._push(below, GOODBYE)
        if not below or time.monotonic() > close_by - CLOSE_SECONDS + _FLUSH_SECONDS:
            self._push([self.tree.parent], GOODBYE)

    # What goes out

    def _push(self, ranks: Iterable[int | None], frame: LineFrame) -> None:
        """What is for a rank that is gone goes nowhere."""
        for rank in ranks:
            if rank in self.wires:
                self.wires[rank].push(frame)
                self._unsent.add(rank)

    def _mute(self) -> None:
        """While much waits for the one above, those below are not read."""
        above = self.wires.get(self.tree.parent) if self.tree.parent is not None else None
        is_muted = above is not None and above.is_full()
        if is_muted != self._is_muted:
            self._is_muted = is_muted
            for rank in self.wires.keys() & self.tree.children:
                self._watch(self.wires[rank])

    def _watch(self, wire: Wire) -> None:
        assert self.selector is not None
        is_heard = not (self._is_muted and wire.rank in self.tree.children)
        wanted = (selectors.EVENT_READ if is_heard else 0) | (selectors.EVENT_WRITE if wire.rank in self._unsent else 0)
        key = self.selector.get_map().get(wire.socket)
        if key is None and wanted:
            self.selector.register(wire.socket, wanted, wire)
        elif key is not None and not wanted:
            self.selector.unregister(wire.socket)
        elif key is not None and key.events != wanted:
            self.selector.modify(wire.socket, wanted, wire)

    def _tell(self, callback: Callable[..., None], *facts: object) -> None:
        try:
            callback(*facts)
        except Exception:
            logger.exception("a callback of the line failed; the line goes on")
