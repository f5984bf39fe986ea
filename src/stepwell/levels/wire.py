"""One connection between two nodes, as both ends use it: frames, file ranges, and how long the other end may take.

Owns:    framing (length, then JSON), sending ranges of files, the limits that both sides know.
Not:     who is at the other end (secret), what is asked (serve, fetch).
Holds:   a length from the network is checked before anything is kept for it; no wait is without an end; without TLS
         the bytes of a file go from page cache to socket without a copy.

A request is a frame. An answer is a frame with `nbytes`, and so many raw bytes; or a frame with `error` and `kind`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import struct
import time
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.format.document import parse_json

Message = dict[str, Any]
Address = tuple[str, int]

MAX_FRAME_BYTES: Final = 64 << 10
"""Of a request, and of the head of an answer."""
MAX_RANGE_BYTES: Final = 64 << 20
"""Of a file, in one request."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of the answer to a question."""
LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""On average, once the grace is over. Only time spent waiting for the other end counts."""
_LENGTH: Final = struct.Struct("<I")
_TLS_BYTES: Final = 256 << 10
_WANTS: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Patience:
    """How long one exchange may wait for the other end: some seconds, and longer for who moves bytes fast enough."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._waited = 0.0

    def wait(self, sock: socket.socket, event: int, done: int) -> None:
        """Return when the socket is ready. Raises TimeoutError; `done`: bytes that were moved so far."""
        began = time.monotonic()
        left = max(self._left, done / LEAST_BYTES_PER_SECOND) - self._waited
        poll = select.poll()
        poll.register(sock, event)
        is_ready = left > 0 and poll.poll(left * 1000)
        self._waited += time.monotonic() - began
        if not is_ready:
            raise TimeoutError(f"the other end kept us waiting for {self._waited:.1f} s, after {done} bytes")


class Stream:
    """A connection whose socket never blocks by itself. Used by one thread at a time; any may call `hang_up`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock

    def receive(self, view: memoryview, patience: Patience) -> None:
        """Fill `view`. Raises OSError."""
        done = 0
        while done < len(view):
            try:
                got = self.socket.recv_into(view[done:])
            except _WANTS as want:
                patience.wait(self.socket, _event(want, select.POLLIN), done)
                continue
            if not got:
                raise ConnectionResetError(f"the other end hung up after {done} of {len(view)} bytes")
            done += got

    def receive_bytes(self, count: int, patience: Patience) -> bytes:
        """So many bytes, which the caller has checked. Raises OSError."""
        data = bytearray(count)
        self.receive(memoryview(data), patience)
        return bytes(data)

    def receive_message(self, patience: Patience) -> Message:
        """One frame. Raises OSError, and DamagedError for what is none."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size, patience))
        if length > MAX_FRAME_BYTES:
            raise DamagedError(f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
        return parse_message(self.receive_bytes(length, patience))

    def send(self, data: bytes, patience: Patience) -> None:
        """Send all of it. Raises OSError."""
        self._send(memoryview(data), 0, patience)

    def _send(self, data: memoryview, before: int, patience: Patience) -> None:
        done = 0
        while done < len(data):
            try:
                done += self.socket.send(data[done:])
            except _WANTS as want:
                patience.wait(self.socket, _event(want, select.POLLOUT), before + done)

    def send_range(self, fd: int, start: int, nbytes: int, patience: Patience) -> None:
        """Send a range of a file. Raises OSError; a file that ends early too, since the head has promised the bytes."""
        if isinstance(self.socket, ssl.SSLSocket):
            return self._send_range_by_hand(fd, start, nbytes, patience)
        done = 0
        while done < nbytes:
            try:
                sent = os.sendfile(self.socket.fileno(), fd, start + done, nbytes - done)
            except BlockingIOError:
                patience.wait(self.socket, select.POLLOUT, done)
                continue
            if not sent:
                raise OSError(f"the file ends at {start + done}")
            done += sent
        return None

    def _send_range_by_hand(self, fd: int, start: int, nbytes: int, patience: Patience) -> None:
        """TLS encrypts what passes through this process."""
        room, done = memoryview(bytearray(min(_TLS_BYTES, nbytes))), 0
        while done < nbytes:
            got = os.preadv(fd, [room[: nbytes - done]], start + done)
            if not got:
                raise OSError(f"the file ends at {start + done}")
            self._send(room[:got], done, patience)
            done += got

    def hang_up(self) -> None:
        """End the connection, also under a thread that waits for it; that one closes it."""
        with contextlib.suppress(OSError):  # the other end was faster
            # Not SSLSocket's: that one would take the encryption away from under the other thread.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _event(want: OSError, otherwise: int) -> int:
    if isinstance(want, ssl.SSLWantReadError):
        return select.POLLIN
    return select.POLLOUT if isinstance(want, ssl.SSLWantWriteError) else otherwise


def frame(message: Message) -> bytes:
    """The bytes of one message. Raises ValueError or TypeError for what is no JSON or too long."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes, more than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def parse_message(data: bytes) -> Message:
    """A JSON object. Raises DamagedError."""
    message = parse_json(data, path="message")
    if not isinstance(message, dict):
        raise DamagedError(f"a message is an object, not {type(message).__name__}")
    return message


def label_of(address: Address) -> str:
    """An address for messages."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
