"""The run's secret, and how two nodes prove to each other that they know it.

Owns:    drawing the secret, and the proofs at the start of a connection: the server sends a challenge, the caller
         answers with a number of its own and a keyed hash over both and the run, the server proves itself likewise.
Not:     how the secret travels (by the group, which only the run's processes are in), and connections (wire).
Holds:   the secret is never sent over a connection; a proof that was overheard is worth nothing in another connection,
         nor in the other direction.
"""

from __future__ import annotations

import hmac
import os
import re
from typing import Final

from stepwell.errors import ConfigError

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
ANSWER_BYTES: Final = NONCE_BYTES + PROOF_BYTES
"""What a caller sends: its number, and its proof."""
REFUSED: Final = bytes(PROOF_BYTES)
"""In the place of the server's proof: the caller's was wrong."""
CALLER: Final = b"stepwell peer/1 caller:"
SERVER: Final = b"stepwell peer/1 server:"
_SECRET: Final = re.compile(r"[0-9a-f]{64}")


def draw_secret() -> str:
    """A new secret: 32 bytes from the kernel, in hex."""
    return os.urandom(32).hex()


def key_of(secret: str) -> bytes:
    """The key behind a secret. Raises ConfigError for what `draw_secret` cannot have given; never repeats it."""
    if not _SECRET.fullmatch(secret):
        raise ConfigError("the secret of a run is 64 hex digits; take one from draw_secret()")
    return bytes.fromhex(secret)


def prove(key: bytes, who: bytes, run: str, challenge: bytes, answer: bytes) -> bytes:
    """What only who knows the key can tell about two numbers and a run. All but the run have a fixed size."""
    return hmac.digest(key, who + challenge + answer + run.encode(), "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(given, expected)
