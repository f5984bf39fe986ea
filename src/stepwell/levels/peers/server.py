"""This node's files for the other nodes of the run.

Owns:    who is let in and how many, ranges of files below one directory, questions handed to a callback.
Not:     what the questions mean, and what lies in the directory.
Before:  the agent has a cache and the run's secret.   After: `fetch` on other nodes.
Holds:   nobody learns anything before proving that it knows the secret; only regular files, one directory deep, are
         ever opened, links never followed; connections, threads and bytes in memory have limits; nothing here waits
         for ever, and nothing here runs on a thread of the caller's.

One thread accepts and greets. Who is known gets a thread of its own, up to the limit: it mostly sleeps in `sendfile`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.events.run_events import logger
from stepwell.levels.peers.peer_frames import (
    MAX_ANSWER_BYTES,
    MAX_RANGE_BYTES,
    Address,
    Message,
    Patience,
    Stream,
    frame,
    terms_of,
)
from stepwell.levels.peers.request import RequestRefusal, open_below, read_count, read_names
from stepwell.ranks.wire.greeting import Guest

Answer = Callable[[str, Message], Message]
"""Called with a question and its fields. On any thread of the server, on several at once."""

MAX_CONNECTIONS: Final = 64
MAX_GUESTS: Final = 16
"""Connections that have not proved anything yet: the oldest has to go when one more comes."""
GREETING_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 10.0
"""After so much waiting for a reader, it has to have taken `wire.LEAST_BYTES_PER_SECOND` on average."""
_BACKLOG: Final = 1024
_TICK_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
_CLOSE_SECONDS: Final = 2.0
_MAX_TROUBLE: Final = 1000


class PeerServer:
    """Serves `root`, which holds a directory for each checkpoint. `address` tells where, once it is started.

    bind:  host (empty: all) and port (0: any); or a socket of `listen`, which somebody else keeps for the next server
    """

    def __init__(
        self,
        root: Path,
        secret: str,
        run: str,
        answer: Answer,
        *,
        bind: Address | socket.socket,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._root, self._terms, self._answer = root, terms_of(secret, run), answer
        self.address: Address = ("", 0)
        self._bind, self._tls = bind, tls
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._guests: dict[Guest, None] = {}  # in the order they came
        self._greeted: dict[Stream, float] = {}  # who knows the secret and waits for a place, and until when
        self._members: dict[Stream, threading.Thread] = {}
        self._resting: dict[Stream, None] = {}  # members that were served and wait, the longest first
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()

    @property
    def refused(self) -> dict[str, int]:
        """How often something was refused, by kind: full, pushed out, late, hung up, tls, proof, frame, name, missing,
        range, question, slow, failed.
        """
        with self._lock:
            return dict(self._refused)

    def start(self) -> None:
        """Listen, and return. Raises OSError if the address or the directory cannot be had."""
        os.close(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            self._listener = self._bind if isinstance(self._bind, socket.socket) else listen(self._bind)
            self.address = self._listener.getsockname()[:2]
            self._thread = threading.Thread(
                target=self._run, args=(self._listener,), daemon=True, name="stepwell-peers"
            )
            self._thread.start()
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Hang up on everybody and end the threads, for up to 2 s. May be called twice."""
        self._is_closing.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        if self._thread is not None and self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(_CLOSE_SECONDS)
        with self._lock:
            members = dict(self._members)
            for stream in members:
                stream.hang_up()
        for thread in members.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._let_go()

    def _let_go(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _count(self, kind: str) -> None:
        with self._lock:
            self._refused[kind] += 1

    # The thread at the door

    def _run(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                try:
                    self._go_round(selector, listener)
                except Exception:  # not foreseen: nobody may shut the door for the others
                    logger.exception("a round of the server for peers failed; it goes on")
                    self._is_closing.wait(_PAUSE_SECONDS)
            for guest in list(self._guests):
                self._dismiss(selector, guest, None)
            for stream in self._greeted:
                stream.close()

    def _go_round(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        ready = [key.data for key, _ in selector.select(self._next_deadline())]
        # First who is there: somebody who has just answered is not pushed out by who has just come.
        for guest in ready:
            if guest is not None:
                self._hear(selector, guest)
        for guest in [guest for guest in self._guests if time.monotonic() > guest.deadline]:
            self._dismiss(selector, guest, "late")
        if None in ready:
            self._welcome(selector, listener)
        self._seat()

    def _next_deadline(self) -> float:
        least = _PAUSE_SECONDS if self._greeted else _TICK_SECONDS
        return max(0.0, min([least, *(guest.deadline - time.monotonic() for guest in list(self._guests)[:1])]))

    def _welcome(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        for _ in range(MAX_GUESTS):  # then those inside are heard again
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no descriptors left: the caller stays in the queue
                if not self._is_closing.wait(_PAUSE_SECONDS):
                    logger.info("cannot take a connection of a peer: %s", error)
                return
            taken = len(self._members) + len(self._greeted) + len(self._guests)
            is_full = taken >= MAX_CONNECTIONS and not self._resting
            if is_full or len(self._guests) >= MAX_GUESTS:
                oldest = next(iter(self._guests), None)
                if oldest is None:
                    self._count("full")
                    sock.close()
                    continue
                self._dismiss(selector, oldest, "pushed out")
            self._take_in(selector, sock)

    def _take_in(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            guest = Guest(sock, self._terms, GREETING_SECONDS)
            selector.register(sock, selectors.EVENT_READ, guest)
        except (OSError, ValueError):  # gone already
            sock.close()
            self._count("hung up")
            return
        self._guests[guest] = None
        self._hear(selector, guest)

    def _hear(self, selector: selectors.BaseSelector, guest: Guest) -> None:
        if guest not in self._guests:
            return  # sent away a moment ago, and still in this round of the selector
        try:
            is_known = guest.advance()
        except PermissionError:
            self._dismiss(selector, guest, "proof")
        except ssl.SSLError:
            self._dismiss(selector, guest, "tls")
        except (OSError, ValueError):
            self._dismiss(selector, guest, "hung up")
        else:
            if is_known:
                self._admit(selector, guest)
            else:
                selector.modify(guest.socket, _wanted(guest), guest)

    def _dismiss(self, selector: selectors.BaseSelector, guest: Guest, kind: str | None) -> None:
        if kind is not None:
            self._count(kind)
        del self._guests[guest]
        selector.unregister(guest.socket)
        guest.socket.close()

    def _admit(self, selector: selectors.BaseSelector, guest: Guest) -> None:
        del self._guests[guest]
        selector.unregister(guest.socket)
        self._greeted[Stream(guest.socket, guest.seals)] = guest.deadline

    def _seat(self) -> None:
        """Whoever was greeted believes to be in: he waits for a place rather than being sent away."""
        for stream, deadline in list(self._greeted.items()):
            if self._make_room():
                del self._greeted[stream]
                thread = threading.Thread(target=self._serve, args=(stream,), daemon=True, name="stepwell-peer")
                with self._lock:
                    self._members[stream] = thread
                try:
                    thread.start()
                    continue
                except RuntimeError:  # a limit on processes or memory
                    self._leave(stream)
            elif time.monotonic() <= deadline:
                continue
            self._greeted.pop(stream, None)
            self._count("full")
            stream.close()

    def _make_room(self) -> bool:
        """Where there are more nodes than places, who was served and has no wish now has to come in again."""
        with self._lock:
            if len(self._members) < MAX_CONNECTIONS:
                return True
            longest = next(iter(self._resting), None)
            if longest is not None:
                del self._resting[longest]
                longest.hang_up()
            return longest is not None

    # The thread of one peer

    def _serve(self, stream: Stream) -> None:
        try:
            while not self._is_closing.is_set():
                request = self._next_request(stream)
                with self._lock:
                    self._resting.pop(stream, None)
                self._exchange(stream, request)
                with self._lock:
                    self._resting[stream] = None
        except ConnectionError:
            pass  # hung up, as everybody does in the end
        except DamagedError as error:
            self._count("frame")
            logger.info("a peer sent what is no request: %s", error)
        except TimeoutError:
            self._count("slow")
        except OSError as error:
            self._count("failed")
            logger.info("a peer was not served: %s", error)
        except Exception:  # not foreseen: this peer is lost, the others are not
            self._count("failed")
            logger.exception("a peer was not served")
        finally:
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        with self._lock:
            del self._members[stream]
            self._resting.pop(stream, None)
            stream.close()

    def _next_request(self, stream: Stream) -> Message:
        try:
            return stream.receive_message(Patience(IDLE_SECONDS))
        except TimeoutError:
            raise ConnectionError("idle") from None

    def _exchange(self, stream: Stream, request: Message) -> None:
        patience = Patience(GRACE_SECONDS)
        try:
            if request.get("op") == "ask":
                body = self._ask(request)
                stream.send_answer(frame({"nbytes": len(body)}), body, patience)
            elif request.get("op") == "read":
                with self._open(request) as (fd, start, nbytes):
                    stream.send_frame(frame({"nbytes": nbytes}), patience)
                    stream.send_range(fd, start, nbytes, patience, is_sealed=request.get("sealed") is True)
            else:
                raise RequestRefusal("frame", "not a request")
        except RequestRefusal as refusal:
            self._count(refusal.kind)
            stream.send_frame(frame({"error": str(refusal)[:_MAX_TROUBLE], "kind": refusal.kind}), patience)

    def _ask(self, request: Message) -> bytes:
        question, fields = request.get("question"), request.get("fields")
        if not isinstance(question, str) or not isinstance(fields, dict):
            raise RequestRefusal("frame", "a question is a text and an object")
        try:
            body = json.dumps(self._answer(question, fields), separators=(",", ":"), allow_nan=False).encode()
        except (Exception, SystemExit) as error:  # whatever it is: the server lives on, and the caller is told
            logger.exception("the question %.100r of a peer could not be answered", question)
            raise RequestRefusal("question", f"{type(error).__name__}: {error}") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise RequestRefusal("question", f"an answer of {len(body)} bytes, more than {MAX_ANSWER_BYTES}")
        return body

    @contextlib.contextmanager
    def _open(self, request: Message) -> Iterator[tuple[int, int, int]]:
        directory, name = read_names(request)
        start, nbytes = read_count(request, "start"), read_count(request, "nbytes")
        if nbytes > MAX_RANGE_BYTES:
            raise RequestRefusal("range", f"{nbytes} bytes at once, more than {MAX_RANGE_BYTES}")
        fd = open_below(self._root, directory, name)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise RequestRefusal("missing", f"{directory}/{name}: not a regular file")
            if start + nbytes > found.st_size:
                raise RequestRefusal("range", f"{directory}/{name}: ends at {found.st_size}")
            yield fd, start, nbytes
        finally:
            os.close(fd)


def _wanted(guest: Guest) -> int:
    return selectors.EVENT_WRITE if guest.wants_to_write else selectors.EVENT_READ


def listen(bind: Address) -> socket.socket:
    """A socket that waits for connections; until somebody serves it they wait too. Raises OSError."""
    host, port = bind
    if not host and socket.has_dualstack_ipv6():
        listener = socket.create_server(bind, family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server(bind, family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
