"""Lines whose ranks are threads, and a rank that a test plays by hand."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from stepwell.groups.line import Line
from stepwell.groups.meet import Place, call
from stepwell.groups.wire import Message
from tests.groups.circle import Circle

SECONDS = 10.0


class End:
    """A line, and what its callbacks were told."""

    def __init__(self, circle: Circle, rank: int) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[int] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()
        self.group = circle.rank(rank)
        self.line = Line(self.group, self._hear, self._lose)

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


def open_all(stack: ExitStack, size: int) -> list[End]:
    circle = Circle(size)
    ends = [End(circle, rank) for rank in range(size)]
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
        place = self._group.broadcast(None, "opening the line: where rank 0 listens", SECONDS)
        self.place = Place.from_plain(place)

    def connect(self, rank: int = 1, token: bytes | None = None, seconds: float = SECONDS) -> socket.socket:
        place = Place(self.place.addresses, self.place.port, token or self.place.token)
        sock = call(place, rank, time.monotonic() + seconds)
        self._stack.callback(sock.close)
        return sock

    def join(self) -> None:
        self._group.all_gather({}, "opening the line: who is connected", SECONDS)
        self._opening.result(SECONDS)

    def raw(self) -> socket.socket:
        sock = socket.create_connection((self.place.addresses[0], self.place.port), timeout=SECONDS)
        self._stack.callback(sock.close)
        return sock


def frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<Q", len(body)) + body


def is_hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
