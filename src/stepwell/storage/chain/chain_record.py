"""The bytes of one record: a head of fixed size with digests, then the sections of the parts and the caller's note.

Owns:    `Head`, joining and cutting sections, and the note's bytes.
Before:  `parts` made the sections.   After: `segment` appends the bytes to a file.
Holds:   a head is believed only with its own checksum, a body only with the one in the head; a head names the state it
         is for and the state it leads to, so that a record in the wrong place is never applied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from stepwell.errors import DamagedError
from stepwell.storage.codecs import zstd_frames

MAGIC: Final = b"swdelta1"
BASE, DELTA, SKIP = range(3)
KINDS: Final = ("base", "delta", "skip")
SUSPECT: Final = 1
"""Flag: a group had values that could not be coded (NaN, infinity), and is stored as it is."""
MOST_NOTE_BYTES: Final = 64 << 20
_NOTE_LEVEL: Final = 3
_FIELDS: Final = struct.Struct("<8sBBHIQQQ16s16s16sQQ")
HEAD_NBYTES: Final = _FIELDS.size + 8


@dataclass(frozen=True)
class Head:
    """number: 0 for the base, then one more each. parent: the number of the record that the state before it is of.
    manifest: digest of the leaves and their codecs. before, after: digests of the reader's state.
    """

    kind: int
    flags: int
    parts: int
    number: int
    step: int
    parent: int
    manifest: bytes
    before: bytes
    after: bytes
    body_nbytes: int
    body_digest: int

    def dump(self) -> bytes:
        """The head with its checksum."""
        data = _FIELDS.pack(
            MAGIC, self.kind, self.flags, 0, self.parts, self.number, self.step, self.parent, self.manifest,
            self.before, self.after, self.body_nbytes, self.body_digest,
        )  # fmt: skip
        return data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Head:
        """Check and parse a head. Raises DamagedError."""
        if len(data) != HEAD_NBYTES or data[:8] != MAGIC:
            raise DamagedError(f"{path}: no record begins here", path=path)
        if xxhash.xxh3_64_intdigest(data[:-8]).to_bytes(8, "little") != data[-8:]:
            raise DamagedError(f"{path}: the head of a record does not have its checksum", path=path)
        _, kind, flags, zero, *rest = _FIELDS.unpack(data[:-8])
        if kind >= len(KINDS) or zero:
            raise DamagedError(f"{path}: a record of unknown kind {kind}", path=path, found=kind)
        return cls(kind, flags, *rest)


Pieces = list[bytes]
"""Bytes of a section or a body, not put together: they may be many."""


def join(sections: Sequence[Pieces]) -> Pieces:
    """The body: length of each section, then the sections."""
    lengths = [sum(map(len, section)) for section in sections]
    return [struct.pack(f"<{len(sections)}Q", *lengths), *(piece for section in sections for piece in section)]


def cut(body: memoryview, count: int) -> list[memoryview]:
    """The sections of a body. Raises DamagedError unless they fill it exactly."""
    start = 8 * count
    if len(body) < start:
        raise DamagedError("a record's body is shorter than its list of sections", found=len(body))
    sections = []
    for nbytes in struct.unpack(f"<{count}Q", body[:start]):
        sections.append(body[start : start + nbytes])
        start += nbytes
    if start != len(body):
        raise DamagedError("a record's sections do not fill its body", expected=start, found=len(body))
    return sections


def dump_note(note: bytes) -> bytes:
    """The section of a note of at most MOST_NOTE_BYTES: nothing, or one zstd frame."""
    return zstd_frames.compress(note, level=_NOTE_LEVEL) if note else b""


def load_note(section: memoryview) -> bytes:
    """The note. Raises DamagedError."""
    return zstd_frames.decompress_at_most(section, MOST_NOTE_BYTES) if section else b""


def body_digest(*body: bytes | memoryview) -> int:
    """xxh3-64."""
    whole = xxhash.xxh3_64()
    for piece in body:
        whole.update(piece)
    return whole.intdigest()
