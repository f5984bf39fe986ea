"""How the ranks find rank 0 and prove that they belong to the run.

Owns:    the addresses rank 0 can be reached at, and the greeting on a new connection: rank 0 sends a challenge, the
         caller answers with its rank and a keyed hash over both, rank 0 proves itself likewise.
Not:     how the token travels (by the group, which only the run's processes are in).
Holds:   the token itself is never sent over a connection; who does not know it learns nothing and is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from stepwell.groups.wire import prepare

_RANK: Final = struct.Struct("<I")
_NONCE_BYTES: Final = 16
_HASH_BYTES: Final = 32
_ANSWER_BYTES: Final = _RANK.size + _NONCE_BYTES + _HASH_BYTES
_TRY_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Place:
    """Where rank 0 listens, and the secret of this line."""

    addresses: list[str]
    port: int
    token: bytes

    def to_plain(self) -> dict[str, Any]:
        """For the group, which carries JSON."""
        return {"addresses": self.addresses, "port": self.port, "token": self.token.hex()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Place:
        """What `to_plain` gave."""
        return cls(plain["addresses"], plain["port"], bytes.fromhex(plain["token"]))


def listen(size: int, *, is_one_node: bool) -> tuple[socket.socket, Place]:
    """Listen on a free port: for this machine only if all ranks are on it."""
    if is_one_node:
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        addresses = ["127.0.0.1"]
    else:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=has_both)
        addresses = _own_addresses()
    listener.setblocking(False)
    return listener, Place(addresses, listener.getsockname()[1], secrets.token_bytes(16))


class Guest:
    """A connection to rank 0 that has not proved anything yet. Never blocks."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + _TRY_SECONDS
        self._token = token
        self._challenge = secrets.token_bytes(_NONCE_BYTES)
        self._answer = b""

    def greet(self) -> None:
        """Send the challenge."""
        self.socket.setblocking(False)
        self.socket.send(self._challenge)

    def read(self) -> int | None:
        """The rank, once proved; None if there is more to come. Raises OSError for who cannot prove it."""
        # Not more than the answer: what follows belongs to the wire.
        data = self.socket.recv(_ANSWER_BYTES - len(self._answer))
        if not data:
            raise ConnectionError("the caller hung up")
        self._answer += data
        if len(self._answer) < _ANSWER_BYTES:
            return None
        claim, proof = self._answer[:-_HASH_BYTES], self._answer[-_HASH_BYTES:]
        if not hmac.compare_digest(proof, _prove(self._token, b"caller", self._challenge, claim)):
            raise PermissionError("the caller does not know the token")
        self.socket.send(_prove(self._token, b"rank 0", self._challenge, claim))
        rank: int = _RANK.unpack_from(claim)[0]
        return rank


def call(place: Place, rank: int, deadline: float) -> socket.socket:
    """Connect to rank 0, at whichever address it can be reached. Blocks; raises OSError when the time is over."""
    while True:
        errors = []
        for address in place.addresses:
            left = min(_TRY_SECONDS, deadline - time.monotonic())
            try:
                return _call_one((address, place.port), place.token, rank, max(0.1, left))
            except OSError as error:
                errors.append(f"{address}: {error}")
        if time.monotonic() > deadline:
            raise ConnectionError(f"port {place.port}: {', '.join(errors)}")
        time.sleep(_PAUSE_SECONDS)


def _call_one(address: tuple[str, int], token: bytes, rank: int, seconds: float) -> socket.socket:
    sock = socket.create_connection(address, timeout=seconds)
    try:
        prepare(sock)
        challenge = _receive(sock, _NONCE_BYTES)
        claim = _RANK.pack(rank) + secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(claim + _prove(token, b"caller", challenge, claim))
        if not hmac.compare_digest(_receive(sock, _HASH_BYTES), _prove(token, b"rank 0", challenge, claim)):
            raise PermissionError("somebody else answers there")
    except BaseException:
        sock.close()
        raise
    return sock


def _prove(token: bytes, who: bytes, challenge: bytes, claim: bytes) -> bytes:
    return hmac.digest(token, who + challenge + claim, "sha256")


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
        return "127.0.0.1"
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
