"""The secret of a run, and the keys that follow from it.

Owns:    drawing it, its form, the variable STEPWELL_SECRET, keys for one purpose each.
Not:     where it is kept (keyfile, store.secret); proofs (greeting).
Holds:   a secret is never part of an error, an event or a name, and no key tells anything about another one. Neither
         travels over torch's store, MPI, Horovod or a connection.
"""

from __future__ import annotations

import hmac
import os
import re
from typing import Final

from stepwell.errors import ConfigError

VARIABLE: Final = "STEPWELL_SECRET"
_SECRET: Final = re.compile(r"[0-9a-f]{64}")


def draw_secret() -> str:
    """A new secret: 32 bytes from the kernel, in hex."""
    return os.urandom(32).hex()


def key_of(secret: str) -> bytes:
    """The key behind a secret. Raises ConfigError for what `draw_secret` cannot have given; never repeats it."""
    if not _SECRET.fullmatch(secret):
        raise ConfigError("the secret of a run is 64 hex digits (0-9, a-f); make one with: openssl rand -hex 32")
    return bytes.fromhex(secret)


def key_from_environment() -> bytes | None:
    """What STEPWELL_SECRET holds; None if it is not set. Raises ConfigError."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return key_of(text.strip())
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None


def derive(key: bytes, purpose: str, about: str = "") -> bytes:
    """A key for one purpose: 32 bytes that tell nothing about `key` or those for other purposes."""
    return hmac.digest(key, f"stepwell {purpose}:{about}".encode(), "sha256")
