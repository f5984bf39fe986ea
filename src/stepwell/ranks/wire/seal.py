"""Frames of a connection whose ends have greeted each other: nobody else can change, repeat, reorder or drop one.

Owns:    the tag after each frame: a keyed hash over its number, in its direction, and the digest of its bytes.
Not:     keys (greeting), how frames are cut (groups.wire, levels.wire). Nothing is encrypted: that is TLS.
Holds:   a tag is worth nothing in another place of the connection, in the other direction, or in another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, Protocol

from stepwell.errors import DamagedError
from stepwell.ranks.wire.secret import derive

TAG_BYTES: Final = 32
_NUMBER: Final = struct.Struct("<Q")
_CALLER, _SERVER = "frames of the caller", "frames of the server"


class Digest(Protocol):
    """What `hashlib` gives."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


def begin_digest() -> Digest:
    """Of bytes that come piece by piece."""
    return hashlib.sha256()


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Of bytes that are all there."""
    return hashlib.sha256(data).digest()


def is_tag(given: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(given, expected)


class Seals:
    """Of one end of one connection. One thread at a time for each direction."""

    def __init__(self, session: bytes, *, is_caller: bool) -> None:
        caller, server = derive(session, _CALLER), derive(session, _SERVER)
        self._out, self._in = (caller, server) if is_caller else (server, caller)
        self._sent = self._received = 0

    def seal(self, digest: bytes) -> bytes:
        """The tag of the next frame that is sent."""
        self._sent += 1
        return _tag(self._out, self._sent, digest)

    def check(self, digest: bytes, tag: bytes) -> None:
        """Count the next frame that came. Raises DamagedError if it is not what the other end sent."""
        self._received += 1
        if not is_tag(tag, _tag(self._in, self._received, digest)):
            raise DamagedError("the bytes were changed on their way, or come from somebody else")


def _tag(key: bytes, number: int, digest: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + digest, "sha256")
