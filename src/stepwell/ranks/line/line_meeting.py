"""How the ranks find who is above them on the line, and prove that they belong to the run.

Owns:    the addresses rank 0 can be reached at, and calling it, or the first rank of a node on that node: the greeting
         is that of all connections of a run (trust.greeting), and what the caller claims is its rank.
Not:     the secret, which both ends have from a file or the environment and nothing here passes on.
Holds:   who does not know the secret learns nothing and is dropped, and who was told a wrong address finds out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from stepwell.ranks.line.line_connection import prepare
from stepwell.ranks.wire.greeting import NONCE_BYTES, PROOF_BYTES, Caller, Guest, Terms
from stepwell.ranks.wire.seal import Seals
from stepwell.ranks.wire.secret import derive

_HERE: Final = "127.0.0.1"
_RANK: Final = struct.Struct("<I")
_TRY_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
_BACKLOG: Final = 1024


@dataclass(frozen=True)
class LineAddress:
    """Where a rank listens, and the number of this start: ranks of another start of the run are not let in."""

    addresses: list[str]
    port: int
    start: str

    def to_plain(self) -> dict[str, Any]:
        """For the group, which carries JSON. Nothing in it is secret."""
        return {"addresses": self.addresses, "port": self.port, "start": self.start}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> LineAddress:
        """What `to_plain` gave."""
        return cls(plain["addresses"], plain["port"], plain["start"])

    def beside(self, port: int) -> LineAddress:
        """Where the first rank of this node listens, in the same start. The ranks of a node share its loopback."""
        return LineAddress([_HERE], port, self.start)

    def terms(self, key: bytes) -> Terms:
        """For who has the run's key."""
        return Terms(derive(key, "line"), "line/3", self.start, _RANK.size)


def listen(*, is_for_node: bool) -> tuple[socket.socket, LineAddress]:
    """Listen on a free port: for this machine only if all that call are on it."""
    if is_for_node:
        listener = socket.create_server((_HERE, 0), backlog=_BACKLOG)
        addresses = [_HERE]
    else:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=has_both)
        addresses = _own_addresses()
    listener.setblocking(False)
    return listener, LineAddress(addresses, listener.getsockname()[1], os.urandom(16).hex())


def receive_guest(sock: socket.socket, terms: Terms) -> Guest:
    """Who has called and has not proved anything yet. Raises OSError if it is gone already."""
    sock.setblocking(False)
    return Guest(sock, terms, _TRY_SECONDS)


def rank_of(guest: Guest) -> int:
    """Of one that has proved itself."""
    rank: int = _RANK.unpack(guest.claim)[0]
    return rank


def call(place: LineAddress, key: bytes, rank: int, deadline: float) -> tuple[socket.socket, Seals]:
    """Connect, at whichever address it can be reached. Blocks; raises OSError when the time is over."""
    while True:
        errors = []
        for address in place.addresses:
            left = min(_TRY_SECONDS, deadline - time.monotonic())
            try:
                return _call_one((address, place.port), place.terms(key), rank, max(0.1, left))
            except OSError as error:
                errors.append(f"{address}: {error}")
        if time.monotonic() > deadline:
            raise ConnectionError(f"port {place.port}: {', '.join(errors)}")
        time.sleep(_PAUSE_SECONDS)


def _call_one(address: tuple[str, int], terms: Terms, rank: int, seconds: float) -> tuple[socket.socket, Seals]:
    sock = socket.create_connection(address, timeout=seconds)
    try:
        prepare(sock)
        caller = Caller(terms, _RANK.pack(rank))
        sock.sendall(caller.answer(_receive(sock, NONCE_BYTES)))
        seals = caller.check(_receive(sock, PROOF_BYTES))
        if seals is None:
            raise PermissionError("it does not know the secret of this run, or of this start")
    except BaseException:
        sock.close()
        raise
    return sock, seals


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("hung up during the greeting")
        data += more
    return data


def _own_addresses() -> list[str]:
    """Names and numbers of this machine that others may know, the most likely first."""
    master = os.environ.get("MASTER_ADDR", "")
    found = [master if _is_own(master) else "", socket.gethostname(), socket.getfqdn(), _outward_address()]
    return [address for address in dict.fromkeys(found) if address]


def own_address(*, is_one_node: bool) -> str:
    """One address of this machine that the other nodes reach: what the launcher names, or where it calls from."""
    if is_one_node:
        return _HERE
    master = os.environ.get("MASTER_ADDR", "")
    return master if _is_own(master) else _outward_address() or socket.gethostname()


def _is_own(address: str) -> bool:
    """Whether this machine has that address: only then it can be bound."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _outward_address() -> str:
    """The address this machine calls others from, for where its name means nothing to them. Sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation: nobody is there
        address: str = probe.getsockname()[0]
        return address
    return ""
