"""How messages travel between trainer and agent: length, JSON, and file descriptors beside it.

Owns:    framing, descriptor passing, and the check of who is at the other end.
Not:     what they say (protocol), where a lingering agent can be found (agent_address).
Holds:   a message is either whole or not there; what was sent before a SIGKILL still arrives.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import Final

from stepwell.handover.message import Message, decode, encode
from stepwell.handover.protocol import KINDS

_LENGTH: Final = struct.Struct("<Q")
_MAX_MESSAGE: Final = 1 << 30
_SEND_SECONDS: Final = 10.0


class Channel:
    """One end of a stream socket. Not shared between threads without a lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send one message; descriptors travel with its first byte. Raises OSError if the peer is gone."""
        body = encode(message).encode()
        data = _LENGTH.pack(len(body)) + body
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        rest, deadline = memoryview(data), time.monotonic() + _SEND_SECONDS
        while rest:
            # Bounded: training must not wait for ever for an agent that does not read.
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"the other process did not read for {_SEND_SECONDS:.0f} s")
            with contextlib.suppress(BlockingIOError):
                rest = rest[self.socket.sendmsg([rest], ancillary, socket.MSG_DONTWAIT) :]
                ancillary = []

    def receive(self) -> tuple[Message, list[int]] | None:
        """Block for the next message and the descriptors that came so far; None at the end of the stream.

        Raises MessageError for one that cannot be understood.
        """
        while True:
            message = self.next_buffered()
            if message is not None:
                fds, self._fds = self._fds, []
                return message, fds
            if not self.fill():
                return None

    def has_news(self, seconds: float) -> bool:
        """Whether there is something to read, or the end, within this time."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def fill(self) -> bool:
        """Read what is there (blocking if nothing is). False at the end of the stream."""
        space = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 20, space)
        except ConnectionError:
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                for fd in received:
                    os.set_inheritable(fd, False)
                self._fds.extend(received)
        self._buffer += data
        return bool(data)

    def next_buffered(self) -> Message | None:
        """A message that has fully arrived, or None. Raises MessageError; the next one can be read all the same."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MAX_MESSAGE:
            raise OSError(f"message of {length} bytes, more than {_MAX_MESSAGE}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(body, KINDS)

    def take_fds(self, count: int) -> list[int]:
        """The first descriptors that nobody took yet: they come in the order of their messages."""
        fds, self._fds = self._fds[:count], self._fds[count:]
        return fds

    def close(self) -> None:
        """Close the socket, and descriptors whose message never came."""
        self.socket.close()
        for fd in self.take_fds(len(self._fds)):
            os.close(fd)


def is_same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user (checked by the kernel)."""
    return peer(sock)[1] == os.getuid()


def is_stopped(sock: socket.socket) -> bool:
    """Whether the process at the other end is stopped (SIGSTOP, a debugger): it would not answer for a long time."""
    try:
        with open(f"/proc/{peer(sock)[0]}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and user id of the process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
