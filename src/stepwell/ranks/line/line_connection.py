"""One connection of the line: frames in, frames out, without ever blocking.

Owns:    the tag of each frame on this connection, the bytes that wait to be sent, when a silent peer counts as lost.
Not:     what is in a frame (frame), who is at the other end (meet), where a frame goes (hub); tags (trust.seal).
Holds:   a frame is whole and what the other end sent, or not there. One thread uses it: the line's.
"""

from __future__ import annotations

import fcntl
import itertools
import socket
import termios
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from stepwell.ranks.line.line_frame import GOODBYE, LENGTH, MAX_BYTES, LineFrame, decode
from stepwell.ranks.wire.seal import TAG_BYTES, Seals, digest_of

_READ_BYTES: Final = 1 << 20
_MOST_FRAMES: Final = 64
_STUCK_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 30
_FULL_BYTES: Final = MAX_BYTES // 4


def prepare(sock: socket.socket) -> None:
    """Small messages leave at once, and a machine that has vanished is noticed within 30 s, busy or idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
    # Without it, bytes on their way to nobody are sent again for a quarter of an hour, and keepalive is not asked.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)


class Wire:
    """A connection to `rank`, who has proved to be of this run.

    has_left:    it has said goodbye, or need not: nothing more comes
    is_leaving:  this end has: nothing more is pushed, and the other end may hang up
    """

    def __init__(self, sock: socket.socket, rank: int, seals: Seals) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.rank = rank
        self.has_left = False
        self.is_leaving = False
        self._seals = seals
        self._inbox = bytearray()
        self._frames: deque[LineFrame] = deque()
        self._outbox: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._moved = time.monotonic()

    def push(self, frame: LineFrame) -> None:
        """Put a frame in line behind those that wait; nowhere after a goodbye."""
        if self.is_leaving:
            return
        self.is_leaving = frame is GOODBYE
        if not self._outbox and not self._frames:
            self._moved = time.monotonic()
        self._frames.append(frame)
        self._waiting_bytes += len(frame.data) + TAG_BYTES

    def flush(self) -> bool:
        """Send once, what the connection takes; whether nothing is left. Raises OSError if the peer is gone."""
        while self._frames and len(self._outbox) < _MOST_FRAMES:
            frame = self._frames.popleft()
            self._outbox += [memoryview(frame.data), memoryview(self._seals.seal(frame.digest))]
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
        return not self._outbox and not self._frames

    def receive(self) -> Iterator[LineFrame]:
        """What has arrived, frame by frame. Raises OSError at the end of the stream, ValueError for nonsense, and
        DamagedError for what the other end has not sent.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the connection ended")
        self._inbox += data
        while not self.has_left and (frame := self._next()) is not None:
            yield frame

    def _next(self) -> LineFrame | None:
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > MAX_BYTES:
            raise ValueError(f"a message of {length} bytes, more than {MAX_BYTES}")
        end = LENGTH.size + length
        if len(self._inbox) < end + TAG_BYTES:
            return None
        data = bytes(memoryview(self._inbox)[:end])
        digest = digest_of(memoryview(data)[LENGTH.size :])
        self._seals.check(digest, bytes(memoryview(self._inbox)[end : end + TAG_BYTES]))
        del self._inbox[: end + TAG_BYTES]
        if length == 0:
            self.has_left = True
            return None
        return decode(data, digest)

    def is_full(self) -> bool:
        """Whether so much waits that what others want to have passed on over it is not read from them now."""
        return self._waiting_bytes > _FULL_BYTES

    def is_stuck(self) -> bool:
        """Whether the peer has not taken a byte for long, and too much waits for it."""
        return self._waiting_bytes > MAX_BYTES and time.monotonic() - self._moved > _STUCK_SECONDS

    def is_delivered(self) -> bool:
        """Whether all that was pushed has reached the other machine: closing cannot take it back any more."""
        in_kernel = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not self._outbox and not self._frames and in_kernel == bytes(4)
