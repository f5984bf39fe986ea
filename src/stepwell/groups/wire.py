"""One connection of the line: messages in, messages out, without ever blocking.

Owns:    framing (length, then JSON), the bytes that wait to be sent, when a silent peer counts as lost.
Not:     who is at the other end (meet), and which thread does the work (line).
Holds:   a message is whole or not there; a length from the network is checked before anything is kept for it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from stepwell.errors import GroupError

Message = dict[str, Any]

MAX_BYTES: Final = 64 << 20
"""Of one message; and what may wait for a peer that does not read."""
_LENGTH: Final = struct.Struct("<Q")
GOODBYE: Final = _LENGTH.pack(0)
"""Ends the connection on purpose: who reads it has not lost anybody."""
_READ_BYTES: Final = 1 << 20
_MOST_FRAMES: Final = 64
_STUCK_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 30


def encode(message: Message) -> bytes:
    """The bytes of one message. Raises GroupError if it is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise GroupError(
            f"a message of {len(body)} bytes; at most {MAX_BYTES}: send it in pieces", missing=[], operation="send"
        )
    return _LENGTH.pack(len(body)) + body


def prepare(sock: socket.socket) -> None:
    """Small messages leave at once, and a machine that has vanished is noticed within 30 s, busy or idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
    # Without it, bytes on their way to nobody are sent again for a quarter of an hour, and keepalive is not asked.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)


class Wire:
    """A connection whose other end is known. `push` and `flush` are called under the line's lock."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.rank = rank
        self.has_left = False
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._moved = time.monotonic()

    def push(self, frame: bytes) -> None:
        """Put bytes in line behind those that wait."""
        if not self._outbox:
            self._moved = time.monotonic()
        self._outbox.append(memoryview(frame))
        self._waiting_bytes += len(frame)

    def flush(self) -> bool:
        """Send once, what the connection takes; whether nothing is left. Raises OSError if the peer is gone."""
        if not self._outbox:
            return True
        try:
            sent = self.socket.sendmsg(list(itertools.islice(self._outbox, _MOST_FRAMES)))
        except BlockingIOError:
            return False
        self._moved = time.monotonic()
        self._waiting_bytes -= sent
        while sent:
            first = self._outbox.popleft()
            if sent < len(first):
                self._outbox.appendleft(first[sent:])
            sent -= min(sent, len(first))
        return not self._outbox

    def receive(self) -> Iterator[Message]:
        """What has arrived, message by message. Raises OSError at the end of the stream, ValueError for nonsense."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the connection ended")
        self._inbox += data
        while not self.has_left and (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        if len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        if length > MAX_BYTES:
            raise ValueError(f"a message of {length} bytes, more than {MAX_BYTES}")
        end = _LENGTH.size + length
        if length == 0:
            self.has_left = True
        if length == 0 or len(self._inbox) < end:
            return None
        message = json.loads(self._inbox[_LENGTH.size : end])
        if not isinstance(message, dict):
            raise ValueError(f"a message is an object, not {type(message).__name__}")
        del self._inbox[:end]
        return message

    def is_stuck(self) -> bool:
        """Whether the peer has not taken a byte for long, and too much waits for it."""
        return self._waiting_bytes > MAX_BYTES and time.monotonic() - self._moved > _STUCK_SECONDS

    def is_delivered(self) -> bool:
        """Whether all that was pushed has reached the other machine: closing cannot take it back any more."""
        in_kernel = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not self._outbox and in_kernel == bytes(4)
