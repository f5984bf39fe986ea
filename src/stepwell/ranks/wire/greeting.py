"""How two processes of a run prove to each other that they know its secret, at the start of a connection.

    server -> caller    challenge
    caller -> server    nonce, claim (its rank, say), proof over both numbers, the claim and what the connection is for
    server -> caller    proof over the same, in its own role; or zeros: the caller's was wrong

Owns:    the bytes of the greeting, and the keys for the frames after it.
Holds:   the secret is never sent. A proof that was overheard is worth nothing in another connection, in the other
         direction, for another run or start, or with another claim. Who relays a greeting cannot say a word after it.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Final

from stepwell.ranks.wire.seal import Seals
from stepwell.ranks.wire.secret import derive

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
REFUSED: Final = bytes(PROOF_BYTES)
"""In the place of the server's proof: the caller's was wrong."""
CALLER: Final = b"caller"
SERVER: Final = b"server"


def draw_nonce() -> bytes:
    """A number that was never there before."""
    return os.urandom(NONCE_BYTES)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(given, expected)


@dataclass(frozen=True)
class Terms:
    """What both ends know before they meet.

    what, about:  the kind of connection and its version ("peer/2"), and whose it is: the run, or one start of it
    claim_bytes:  how long the claim of a caller is; the server hears it and may believe it
    """

    key: bytes
    what: str
    about: str
    claim_bytes: int = 0

    def prove(self, who: bytes, challenge: bytes, nonce: bytes, claim: bytes = b"") -> bytes:
        """What only who knows the key can tell. All but `what` and `about`, which both ends know, have a fixed size."""
        text = b"stepwell %s %s:" % (self.what.encode(), who) + challenge + nonce + claim + self.about.encode()
        return hmac.digest(self.key, text, "sha256")

    def seals(self, challenge: bytes, nonce: bytes, claim: bytes = b"", *, is_caller: bool) -> Seals:
        """For the frames after this greeting. Needs the key: who relayed the greeting cannot make them."""
        return Seals(derive(self.prove(b"session", challenge, nonce, claim), "session"), is_caller=is_caller)


class Caller:
    """The caller's half: `answer` what the server sends first, then `check` its proof."""

    def __init__(self, terms: Terms, claim: bytes = b"") -> None:
        self._terms, self._claim = terms, claim
        self._challenge = b""
        self._nonce = draw_nonce()

    def answer(self, challenge: bytes) -> bytes:
        """What to send."""
        self._challenge = challenge
        return self._nonce + self._claim + self._terms.prove(CALLER, challenge, self._nonce, self._claim)

    def check(self, proof: bytes) -> Seals | None:
        """Keys for what follows; None: this end was refused. Raises PermissionError for a server that is not one."""
        if proof == REFUSED:
            return None
        if not is_proof(proof, self._terms.prove(SERVER, self._challenge, self._nonce, self._claim)):
            raise PermissionError("somebody else answers there, who does not know the secret of this run")
        return self._terms.seals(self._challenge, self._nonce, self._claim, is_caller=True)


class Guest:
    """The server's half, step by step, as bytes arrive. Never blocks; reads no byte beyond the answer.

    `claim` and `seals` count once `advance` has returned True. Over TLS there are no seals: it has its own.
    """

    def __init__(self, sock: socket.socket, terms: Terms, seconds: float) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + seconds
        self.wants_to_write = False
        self.claim = b""
        self.seals: Seals | None = None
        self._terms = terms
        self._challenge = self._answer = b""

    def advance(self) -> bool:
        """Go on with what has arrived; whether the caller is known now.

        Raises OSError for who hung up, and PermissionError for who does not know the secret.
        """
        self.wants_to_write = False
        try:
            return self._advance()
        except ssl.SSLWantWriteError:
            self.wants_to_write = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        return False

    def _advance(self) -> bool:
        is_tls = isinstance(self.socket, ssl.SSLSocket)
        if not self._challenge:
            if isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
            self._challenge = draw_nonce()
            self.socket.send(self._challenge)  # the first bytes of a connection always find room
        size = NONCE_BYTES + self._terms.claim_bytes + PROOF_BYTES
        while len(self._answer) < size:
            data = self.socket.recv(size - len(self._answer))
            if not data:
                raise ConnectionResetError("the caller hung up")
            self._answer += data
        nonce, claim, proof = (
            self._answer[:NONCE_BYTES],
            self._answer[NONCE_BYTES:-PROOF_BYTES],
            self._answer[-PROOF_BYTES:],
        )
        if not is_proof(proof, self._terms.prove(CALLER, self._challenge, nonce, claim)):
            self.socket.send(REFUSED)
            raise PermissionError("the caller does not know the secret of this run")
        self.socket.send(self._terms.prove(SERVER, self._challenge, nonce, claim))
        self.claim = claim
        self.seals = None if is_tls else self._terms.seals(self._challenge, nonce, claim, is_caller=False)
        return True
