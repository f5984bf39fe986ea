"""Lines whose ranks are threads, and a rank that a test plays by hand."""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from weakref import WeakKeyDictionary

from stepwell.ranks.line.line import Line
from stepwell.ranks.line.line_frame import Message
from stepwell.ranks.line.line_meeting import LineAddress, call
from stepwell.ranks.wire.seal import TAG_BYTES, Seals, digest_of
from tests.ranks.groups.circle import Circle

SECONDS = 10.0
KEY = b"k" * 32
LISTENS = "opening the line: who listens where"
CONNECTED = "opening the line: who is connected"
_seals: WeakKeyDictionary[socket.socket, Seals] = WeakKeyDictionary()


class End:
    """A line, and what its callbacks were told."""

    def __init__(self, circle: Circle, rank: int, node_of: list[int] | None = None) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[int] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()
        self.group = circle.rank(rank)
        if node_of is not None:
            self.group.node_of, self.group.nodes = node_of, len(set(node_of))
        self.line = Line(self.group, KEY, self._hear, self._lose)

    def _hear(self, rank: int, message: Message) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.heard.append((rank, message))
            self._changed.notify_all()
        if message.get("raise"):
            raise RuntimeError("a callback that fails")

    def _lose(self, rank: int) -> None:
        with self._changed:
            self.lost.append(rank)
            self._changed.notify_all()

    def until(self, claim: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(claim, SECONDS), (self.heard[-3:], self.lost)


def open_all(stack: ExitStack, size: int, node_of: list[int] | None = None) -> list[End]:
    """On one node, if nothing else is said."""
    circle = Circle(size)
    ends = [End(circle, rank, node_of) for rank in range(size)]
    for end in ends:
        stack.callback(end.line.close)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda end: end.line.open(SECONDS), ends))
    return ends


class Caller:
    """Rank 1 of two, played by hand: `place` is what rank 0 said, `join` ends the opening."""

    def __init__(self, stack: ExitStack, seconds: float = SECONDS) -> None:
        circle = Circle(2)
        self.leader = End(circle, 0)
        self._group = circle.rank(1)
        self._stack = stack
        self._opening = stack.enter_context(ThreadPoolExecutor(1)).submit(self.leader.line.open, seconds)
        stack.callback(self.leader.line.close)
        self.place = LineAddress.from_plain(self._group.all_gather(None, LISTENS, SECONDS)[0])

    def connect(self, rank: int = 1, key: bytes = KEY, seconds: float = SECONDS) -> socket.socket:
        sock = dial(self.place, rank, key, seconds)
        self._stack.callback(sock.close)
        return sock

    def join(self) -> None:
        self._group.all_gather({}, CONNECTED, SECONDS)
        self._opening.result(SECONDS)

    def raw(self) -> socket.socket:
        sock = socket.create_connection((self.place.addresses[0], self.place.port), timeout=SECONDS)
        self._stack.callback(sock.close)
        return sock


def dial(place: LineAddress, rank: int, key: bytes = KEY, seconds: float = SECONDS) -> socket.socket:
    """As that rank, for messages made by hand."""
    sock, seals = call(place, key, rank, time.monotonic() + seconds)
    _seals[sock] = seals
    return sock


def frame(sock: socket.socket, message: object, rank: int = 1, kind: int = 0) -> bytes:
    """One message of a rank, sealed for this connection: to be sent once, in this order."""
    return frame_of(sock, json.dumps(message).encode(), rank, kind)


def frame_of(sock: socket.socket, text: bytes, rank: int = 1, kind: int = 0) -> bytes:
    return sealed(sock, struct.pack("<BI", kind, rank) + text)


def sealed(sock: socket.socket, body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body + _seals[sock].seal(digest_of(body))


def read_body(sock: socket.socket, stream: io.BufferedReader) -> bytes:
    """The text of the next frame of who was called, which has to be sealed; nothing for its goodbye."""
    (length,) = struct.unpack("<Q", stream.read(8))
    body = stream.read(length)
    _seals[sock].check(digest_of(body), stream.read(TAG_BYTES))
    return body[5:]


def is_hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
