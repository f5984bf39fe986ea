"""One connection between two nodes, as both ends use it: frames, file ranges, and how long the other end may take.

Owns:    framing (length, JSON, tag), sending ranges of files, the limits that both sides know.
Not:     who is at the other end (trust.greeting), tags (trust.seal), what is asked (serve, fetch).
Holds:   a length from the network is checked before anything is kept for it; no wait is without an end; what is not
         over TLS has a tag, and is looked at once that is right. Bytes of a file go without one, from page cache to
         socket without a copy, unless the reader asks for it.

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
from stepwell.ranks.wire.greeting import Terms
from stepwell.ranks.wire.seal import TAG_BYTES, Digest, Seals, begin_digest, digest_of
from stepwell.ranks.wire.secret import key_of
from stepwell.storage.format.document import parse_json

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
_PIECE_BYTES: Final = 256 << 10
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

    def __init__(self, sock: socket.socket, seals: Seals | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.seals = seals
        """None: this is TLS, or nobody was greeted yet."""

    def receive(self, view: memoryview, patience: Patience, digest: Digest | None = None) -> None:
        """Fill `view`. Raises OSError."""
        done, most = 0, len(view) if digest is None else _PIECE_BYTES
        while done < len(view):
            try:
                got = self.socket.recv_into(view[done : done + most])
            except _WANTS as want:
                patience.wait(self.socket, _event(want, select.POLLIN), done)
                continue
            if not got:
                raise ConnectionResetError(f"the other end hung up after {done} of {len(view)} bytes")
            if digest is not None:
                digest.update(view[done : done + got])
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
        return parse_message(self.receive_sealed(length, patience))

    def receive_sealed(self, count: int, patience: Patience) -> bytes:
        """So many bytes and their tag. Raises OSError, DamagedError."""
        if self.seals is None:
            return self.receive_bytes(count, patience)
        both = self.receive_bytes(count + TAG_BYTES, patience)
        data, tag = both[:count], both[count:]
        self.seals.check(digest_of(data), tag)
        return data

    def receive_range(self, view: memoryview, patience: Patience, *, is_sealed: bool) -> None:
        """Fill `view` with a range of a file. Raises OSError; DamagedError if it `is_sealed` and was changed."""
        if self.seals is None or not is_sealed:
            return self.receive(view, patience)
        digest = begin_digest()
        self.receive(view, patience, digest)
        return self.seals.check(digest.digest(), self.receive_bytes(TAG_BYTES, patience))

    def send_frame(self, data: bytes, patience: Patience) -> None:
        """What `frame` gave. Raises OSError."""
        self.send(data + self._tag(memoryview(data)[_LENGTH.size :]), patience)

    def send_answer(self, head: bytes, body: bytes, patience: Patience) -> None:
        """A frame and the bytes it speaks of, each with its tag. Raises OSError."""
        first = head + self._tag(memoryview(head)[_LENGTH.size :])
        if len(body) <= MAX_FRAME_BYTES:  # as almost always: one packet
            return self.send(first + body + self._tag(body), patience)
        self.send(first, patience)
        self.send(body, patience)
        return self.send(self._tag(body), patience)

    def _tag(self, data: bytes | memoryview) -> bytes:
        return b"" if self.seals is None else self.seals.seal(digest_of(data))

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

    def send_range(self, fd: int, start: int, nbytes: int, patience: Patience, *, is_sealed: bool) -> None:
        """Send a range of a file. Raises OSError; a file that ends early too, since the head has promised the bytes."""
        if isinstance(self.socket, ssl.SSLSocket):
            return self._send_range_by_hand(fd, start, nbytes, patience, None)
        if is_sealed and self.seals is not None:
            digest = begin_digest()
            self._send_range_by_hand(fd, start, nbytes, patience, digest)
            return self.send(self.seals.seal(digest.digest()), patience)
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

    def _send_range_by_hand(self, fd: int, start: int, nbytes: int, patience: Patience, digest: Digest | None) -> None:
        """TLS encrypts what passes through this process; a tag is about what was sent, whatever becomes of the file."""
        room, done = memoryview(bytearray(min(_PIECE_BYTES, nbytes))), 0
        while done < nbytes:
            got = os.preadv(fd, [room[: nbytes - done]], start + done)
            if not got:
                raise OSError(f"the file ends at {start + done}")
            if digest is not None:
                digest.update(room[:got])
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


def terms_of(secret: str, run: str) -> Terms:
    """What both ends have to know. Raises ConfigError for what is no secret."""
    return Terms(key_of(secret), "peer/2", run)


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
