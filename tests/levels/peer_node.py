"""A node that serves its cache, for tests; and callers that do by hand what `Peer` does."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from stepwell.levels.peers.fetch import Peer
from stepwell.levels.peers.peer_frames import terms_of
from stepwell.levels.peers.server import PeerServer
from stepwell.ranks.wire.greeting import NONCE_BYTES, PROOF_BYTES, Caller
from stepwell.ranks.wire.seal import TAG_BYTES, Seals, digest_of
from stepwell.ranks.wire.secret import draw_secret

RUN = "0123456789abcdef"
CHECKPOINT = "step-000000000012.l0001"
SECONDS = 20.0
_seals: WeakKeyDictionary[socket.socket, Seals] = WeakKeyDictionary()
"""Of connections that were greeted by hand: what is sent and received below has tags then."""


class Node:
    """A server in this process, over a directory with one checkpoint."""

    def __init__(self, stack: ExitStack, root: Path, **options: Any) -> None:
        self.stack = stack
        self.root = root
        self.place = root / CHECKPOINT
        self.place.mkdir(parents=True, exist_ok=True)
        self.secret = draw_secret()
        self.threads = threading.active_count()
        self.server = PeerServer(
            root,
            self.secret,
            RUN,
            options.pop("answer", lambda question, fields: {"question": question, **fields}),
            bind=options.pop("bind", ("127.0.0.1", 0)),
            **options,
        )
        self.server.start()
        stack.callback(self.server.close)

    def put(self, name: str, data: bytes) -> bytes:
        (self.place / name).write_bytes(data)
        return data

    def peer(self, **options: Any) -> Peer:
        known = {"address": self.server.address, "secret": self.secret, "run": RUN, "timeout": SECONDS}
        return self.stack.enter_context(closing(Peer(**{**known, **options})))

    def call(self) -> socket.socket:
        """A connection on which nothing was said yet."""
        sock = self.stack.enter_context(socket.create_connection(self.server.address))
        sock.settimeout(SECONDS)
        return sock

    def member(self) -> socket.socket:
        """A connection that has proved itself, for requests made by hand."""
        sock, caller = self.call(), Caller(terms_of(self.secret, RUN))
        sock.sendall(caller.answer(exactly(sock, NONCE_BYTES)))
        seals = caller.check(exactly(sock, PROOF_BYTES))
        assert seals is not None
        seal(sock, seals)
        return sock

    def check_alive(self) -> None:
        """An honest node is served, and the server has no more threads than connections."""
        expected = self.put("alive", b"still here")
        with closing(Peer(self.server.address, self.secret, RUN, SECONDS)) as peer:
            assert read(peer, "alive", 0, len(expected)) == expected
            assert peer.ask("how are you") == {"question": "how are you"}

    def check_refused(self, expected: dict[str, int]) -> None:
        """So much and no more was counted, soon: a caller may hear of it first."""
        until(lambda: self.server.refused == expected, lambda: f"{self.server.refused} instead of {expected}")

    def check_quiet(self) -> None:
        """Soon there is no thread left but the one at the door."""
        until(lambda: threading.active_count() <= self.threads + 1)


def read(peer: Peer, name: str, start: int, nbytes: int, directory: str = CHECKPOINT) -> bytes:
    buffer = bytearray(b"\xee" * (nbytes + 8))
    peer.read(directory, name, start, nbytes, memoryview(buffer))
    assert buffer[nbytes:] == b"\xee" * 8, "written beyond the range"
    return bytes(buffer[:nbytes])


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError(f"hung up after {len(data)} of {count} bytes")
        data += more
    return data


def seal(sock: socket.socket, seals: Seals) -> None:
    """From now on frames on this connection have tags."""
    _seals[sock] = seals


def send_frame(sock: socket.socket, message: Any) -> None:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    send_sealed(sock, body, before=struct.pack("<I", len(body)))


def send_sealed(sock: socket.socket, body: bytes, before: bytes = b"") -> None:
    sock.sendall(before + body + (_seals[sock].seal(digest_of(body)) if sock in _seals else b""))


def receive_frame(sock: socket.socket) -> Any:
    return json.loads(receive_sealed(sock, struct.unpack("<I", exactly(sock, 4))[0]))


def receive_sealed(sock: socket.socket, count: int) -> bytes:
    body = exactly(sock, count)
    if sock in _seals:
        _seals[sock].check(digest_of(body), exactly(sock, TAG_BYTES))
    return body


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other end closes within the socket's timeout; what it still says is read away."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def until(claim: Callable[[], bool], trouble: Callable[[], str] = lambda: "it never became true") -> None:
    deadline = time.monotonic() + SECONDS
    while not claim():
        assert time.monotonic() < deadline, trouble()
        time.sleep(0.01)


@contextmanager
def impostor(act: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """Something else that listens: `act` is called with each connection, on a thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(SECONDS)
                with suppress(OSError):
                    act(sock)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SECONDS)
