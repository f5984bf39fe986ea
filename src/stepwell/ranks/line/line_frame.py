"""What goes over the line: one message with who it is from or for, or a word about a rank.

Owns:    the bytes of a frame, without its tag: length, kind, rank, and JSON.
Not:     tags and connections (wire), where a frame goes next (hub).
Holds:   who passes a frame on does so without reading its JSON. A length from the network is checked before anything
         is kept for it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from stepwell.errors import GroupError
from stepwell.ranks.wire.seal import digest_of

Message = dict[str, Any]

MAX_BYTES: Final = 64 << 20
"""Of one message; and what may wait for a peer that does not read."""
ALL: Final = 0xFFFFFFFF
"""In the place of a rank: from rank 0 to every other one."""
LENGTH: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<BI")


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 0
    """Of that rank, on the way to rank 0; for that rank, on the way from it."""
    LOST = 1
    """That rank is gone without having closed."""
    LEFT = 2
    """That rank has closed, or is about to."""


@dataclass(frozen=True)
class LineFrame:
    """One frame for any number of wires: its bytes, and the digest of its body. Each wire adds a tag of its own."""

    kind: Kind
    rank: int
    data: bytes
    digest: bytes

    def message(self) -> Message:
        """What it carries. Raises ValueError and RecursionError for nonsense."""
        found = json.loads(self.data[LENGTH.size + _HEAD.size :])
        if not isinstance(found, dict):
            raise ValueError(f"a message is an object, not {type(found).__name__}")
        return found


GOODBYE: Final = LineFrame(Kind.LEFT, ALL, LENGTH.pack(0), digest_of(b""))
"""Ends the connection on purpose: who reads it has not lost anybody. Has no body."""


def encode(message: Message, rank: int) -> LineFrame:
    """One message from or for `rank`. Raises GroupError if it is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES - _HEAD.size:
        raise GroupError(
            f"a message of {len(body)} bytes; at most {MAX_BYTES}: send it in pieces", missing=[], operation="send"
        )
    return _frame(Kind.MESSAGE, rank, body)


def word(kind: Kind, rank: int) -> LineFrame:
    """That a rank is lost or has left."""
    return _frame(kind, rank, b"")


def decode(data: bytes, digest: bytes) -> LineFrame:
    """What arrived, with its tag already checked. Raises ValueError for nonsense."""
    if len(data) < LENGTH.size + _HEAD.size:
        raise ValueError(f"a frame of {len(data)} bytes, less than its head")
    kind, rank = _HEAD.unpack_from(data, LENGTH.size)
    return LineFrame(Kind(kind), rank, data, digest)


def _frame(kind: Kind, rank: int, body: bytes) -> LineFrame:
    data = LENGTH.pack(_HEAD.size + len(body)) + _HEAD.pack(kind, rank) + body
    return LineFrame(kind, rank, data, digest_of(memoryview(data)[LENGTH.size :]))
