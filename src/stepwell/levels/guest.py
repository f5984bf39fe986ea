"""A connection to this node that has not proved anything yet.

Owns:    the server's half of the greeting, step by step, as bytes arrive.
Not:     how many there may be, and when one has had its time (serve).
Holds:   never blocks; tells nothing but a random number before the proof; reads no byte beyond the answer.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time

from stepwell.levels.secret import ANSWER_BYTES, CALLER, NONCE_BYTES, PROOF_BYTES, REFUSED, SERVER, is_proof, prove


class Guest:
    """One caller on its way in."""

    def __init__(self, sock: socket.socket, key: bytes, run: str, seconds: float) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + seconds
        self.wants_to_write = False
        self._key, self._run = key, run
        self._challenge = b""
        self._answer = b""

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
        if not self._challenge:
            if isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
            self._challenge = secrets.token_bytes(NONCE_BYTES)
            self.socket.send(self._challenge)  # the first bytes of a connection always find room
        while len(self._answer) < ANSWER_BYTES:
            data = self.socket.recv(ANSWER_BYTES - len(self._answer))
            if not data:
                raise ConnectionResetError("the caller hung up")
            self._answer += data
        nonce, proof = self._answer[:NONCE_BYTES], self._answer[-PROOF_BYTES:]
        if not is_proof(proof, prove(self._key, CALLER, self._run, self._challenge, nonce)):
            self.socket.send(REFUSED)
            raise PermissionError("the caller does not know the secret of this run")
        self.socket.send(prove(self._key, SERVER, self._run, self._challenge, nonce))
        return True
