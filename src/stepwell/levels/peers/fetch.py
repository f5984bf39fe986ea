"""Files and answers of another node of the run.

Owns:    connections to one `PeerServer`, kept for the next request, and several at a time.
Before:  the group has told address and secret.   After: restore reads a `PeerSource` as it reads a file.
Holds:   nothing is asked of who cannot prove that it knows the secret; no call waits for ever; a buffer is filled
         whole or PeerError is raised. What the bytes are worth, the reader's checksums tell.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from stepwell.errors import DamagedError, PeerError
from stepwell.levels.peers.peer_frames import (
    MAX_ANSWER_BYTES,
    MAX_RANGE_BYTES,
    Address,
    Message,
    Patience,
    Stream,
    frame,
    label_of,
    parse_message,
    terms_of,
)
from stepwell.ranks.wire.greeting import NONCE_BYTES, PROOF_BYTES, Caller

Result = TypeVar("Result")
MAX_STREAMS: Final = 4
"""Connections to one peer, and so how many readers at a time it rewards. Its server has places for 16 such clients."""
_SECONDS: Final = 30.0
_GREETING_SECONDS: Final = 10.0
"""For all attempts to be let in: a server that is full, or flooded, hangs up."""
_PAUSE_SECONDS: Final = 0.05
_WITHOUT_TAG: Final = (".safetensors", ".bin")
"""Shards and parity: too many bytes, and checked by the checksums of a record that came with a tag."""
_BROKEN: Final = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class Peer:
    """Another node. For any number of threads, of which `MAX_STREAMS` are served at a time.

    `timeout`: seconds to wait for the next byte, in all of one request; longer only for who sends 1 MiB/s.
    `tls_name`: the name its certificate has to bear, where that is not the host in the address.
    `is_sealed`: shards and parity have tags too, where there is no TLS. Without them, who can change packets can change
    these bytes so that our checksums, which find accidents and no forgers, still fit.
    """

    def __init__(
        self,
        address: Address,
        secret: str,
        run: str,
        timeout: float = _SECONDS,
        *,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
        is_sealed: bool = False,
    ) -> None:
        self.address = address
        self.label = label_of(address)
        self._terms, self._timeout = terms_of(secret, run), timeout
        self._tls, self._tls_name, self._is_sealed = tls, tls_name, is_sealed
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(MAX_STREAMS)
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._is_closed = False

    def ask(self, question: str, /, **fields: Any) -> Message:
        """What the other node's callback answers; it may be asked twice. Blocks. Raises PeerError.

        ValueError or TypeError, if the fields are no JSON or longer than a request may be.
        """

        def receive(stream: Stream, nbytes: int, patience: Patience) -> Message:
            if nbytes > MAX_ANSWER_BYTES:
                raise DamagedError(f"an answer of {nbytes} bytes, more than {MAX_ANSWER_BYTES}")
            return parse_message(stream.receive_sealed(nbytes, patience))

        return self._exchange({"op": "ask", "question": question, "fields": fields}, receive, None)

    def read(self, directory: str, name: str, start: int, nbytes: int, buffer: memoryview) -> None:
        """Fill `buffer[:nbytes]` with that range of a file, whole. Blocks. Raises PeerError."""
        if len(buffer) < nbytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes for {nbytes}")
        # An empty range is asked for too: the file may not be there.
        for done in range(0, max(1, nbytes), MAX_RANGE_BYTES):
            self._read_once(directory, name, start + done, buffer[done : min(nbytes, done + MAX_RANGE_BYTES)])

    def _read_once(self, directory: str, name: str, start: int, view: memoryview) -> None:
        is_sealed = self._is_sealed or not name.endswith(_WITHOUT_TAG)

        def receive(stream: Stream, nbytes: int, patience: Patience) -> None:
            if nbytes != len(view):
                raise DamagedError(f"{nbytes} bytes for a range of {len(view)}")
            stream.receive_range(view, patience, is_sealed=is_sealed)

        request = {"op": "read", "directory": directory, "name": name, "start": start, "nbytes": len(view)}
        request |= {"sealed": True} if is_sealed else {}
        self._exchange(request, receive, f"{directory}/{name}")

    def close(self) -> None:
        """Hang up; threads that wait for this peer get PeerError. May be called twice."""
        with self._lock:
            self._is_closed = True
            for stream in self._busy:
                stream.hang_up()
            for stream in self._idle:
                stream.close()
            self._idle.clear()

    # One request, one answer

    def _exchange(
        self, request: Message, receive: Callable[[Stream, int, Patience], Result], path: str | None
    ) -> Result:
        try:
            data = frame(request)
            with self._turns:
                stream = self._take_idle()
                if stream is not None:
                    # It may have been closed over there since: then nothing was wrong, and a new one is tried.
                    with contextlib.suppress(*_BROKEN), self._using(stream):
                        return self._converse(stream, data, receive)
                    self.rest()
                with self._using(self._connect()) as stream:
                    return self._converse(stream, data, receive)
        except PeerError as error:
            error.fields.update({"path": path} if path else {})
            raise
        except (OSError, DamagedError) as error:
            raise self._trouble(str(error), path=path) from error

    def _converse(self, stream: Stream, data: bytes, receive: Callable[[Stream, int, Patience], Result]) -> Result:
        patience = Patience(self._timeout)
        stream.send_frame(data, patience)
        head = stream.receive_message(patience)
        if "error" in head:
            raise self._trouble(str(head["error"]), kind=str(head.get("kind")))
        nbytes = head.get("nbytes")
        if type(nbytes) is not int or nbytes < 0:
            raise DamagedError("an answer without a size")
        return receive(stream, nbytes, patience)

    def _trouble(self, why: str, *, path: str | None = None, kind: str | None = None) -> PeerError:
        where = f"{path} of peer {self.label}" if path else f"peer {self.label}"
        return PeerError(f"{where}: {why}", peer=self.label, path=path, kind=kind)

    # Connections

    @contextlib.contextmanager
    def _using(self, stream: Stream) -> Iterator[Stream]:
        """Kept after a whole answer, closed after anything else: what is left in it belongs to nobody."""
        is_whole = False
        try:
            yield stream
            is_whole = True
        except PeerError:
            is_whole = True
            raise
        finally:
            with self._lock:
                self._busy.discard(stream)
                if is_whole and not self._is_closed:
                    self._idle.append(stream)
                else:
                    stream.close()

    def _take_idle(self) -> Stream | None:
        with self._lock:
            if self._is_closed:
                raise self._trouble("this end was closed")
            if not self._idle:
                return None
            stream = self._idle.pop()
            self._busy.add(stream)
            return stream

    def rest(self) -> None:
        """Hang up until something is asked for again."""
        with self._lock:
            for stream in self._idle:
                stream.close()
            self._idle.clear()

    def _connect(self) -> Stream:
        """Be let in, again and again while the server only hangs up. Raises OSError, PeerError."""
        deadline = time.monotonic() + min(self._timeout, _GREETING_SECONDS)
        while True:
            try:
                return self._call(max(0.1, deadline - time.monotonic()))
            except ConnectionRefusedError:
                raise
            except _BROKEN:
                if self._is_closed or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def _call(self, seconds: float) -> Stream:
        sock = socket.create_connection(self.address, timeout=seconds)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._tls_name or self.address[0])
            stream = Stream(sock)
            self._greet(stream, Patience(seconds))
            with self._lock:
                if self._is_closed:
                    raise self._trouble("this end was closed")
                self._busy.add(stream)
        except BaseException:
            sock.close()
            raise
        return stream

    def _greet(self, stream: Stream, patience: Patience) -> None:
        caller = Caller(self._terms)
        stream.send(caller.answer(stream.receive_bytes(NONCE_BYTES, patience)), patience)
        seals = caller.check(stream.receive_bytes(PROOF_BYTES, patience))
        if seals is None:
            raise self._trouble("it serves another run, or another start of this one")
        stream.seals = None if self._tls is not None else seals


class PeerSource:
    """A file of a checkpoint in another node's cache, as restore reads it."""

    threads = MAX_STREAMS

    def __init__(self, peer: Peer, directory: str, name: str, nbytes: int) -> None:
        self._peer, self._directory, self._name, self._nbytes = peer, directory, name, nbytes

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"peer:{self._peer.label}/{self._directory}/{self._name}"

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Fill the first part of `buffer` and return it. Raises PeerError."""
        if start + nbytes > self._nbytes:
            raise PeerError(f"{self.label}: ends at {self._nbytes}", peer=self._peer.label, path=self.label)
        self._peer.read(self._directory, self._name, start, nbytes, buffer)
        return buffer[:nbytes]

    def close(self) -> None:
        """The peer stays open: it is its owner's."""
