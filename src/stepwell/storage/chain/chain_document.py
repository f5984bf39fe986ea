"""`chain.json`: which leaves a chain is of, with which codecs, and the digest of its base.

Owns:    the document's fields, and that writer and reader have the same layout.
Holds:   it is the last file of a chain's start: a chain exists if and only if its document does. No length in it is
         believed before a file, or the caller's arrays, have that many bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.storage.chain.chain_record import MOST_NOTE_BYTES
from stepwell.storage.codecs.assignment import CodedLeaf, CodedPart, place
from stepwell.storage.codecs.codec_spec import Spec, parse
from stepwell.storage.format import dtypes
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.document import Fields, seal, unseal

KIND: Final = "stepwell.chain/1"
NAME: Final = "chain.json"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Document:
    """`is_external`: the base is kept elsewhere, and a reader has to be given its state."""

    parts: tuple[CodedPart, ...]
    skip: Spec
    step: int
    base: bytes
    is_external: bool

    @cached_property
    def manifest(self) -> bytes:
        """Digest of leaves and codecs, which every record of the chain carries."""
        return manifest_digest(self.parts, self.skip)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(slot.leaf.nbytes for part in self.parts for slot in part.slots)

    @property
    def most_record_nbytes(self) -> int:
        """More than any record can have: every value as it is, tables, and the longest note."""
        return 2 * self.nbytes + MOST_NOTE_BYTES + (1 << 20)

    def dump(self) -> bytes:
        """Bytes of the file."""
        facts = {"step": self.step, "base": self.base.hex(), "external": self.is_external, "skip": self.skip.text}
        return seal({"format": KIND, **facts, "leaves": _entries(self.parts)})

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Document:
        """Parse and check it. Raises DamagedError."""
        fields = Fields(unseal(data, path=path, kind=KIND), path=path)
        base = fields.text("base")
        if not _DIGEST.fullmatch(base):
            raise DamagedError(f"{path}: the digest of the base is none", path=path)
        found = [_entry(item, path) for item in fields.items("leaves")]
        if len({leaf.name for leaf, _, _ in found}) != len(found):
            raise DamagedError(f"{path}: two leaves share a name", path=path)
        skip = _spec(fields.text("skip"), path)
        if not skip.is_delta:
            raise DamagedError(f"{path}: skip records cannot be coded as {skip.text}", path=path)
        return cls(_parts(found), skip, fields.integer("step"), bytes.fromhex(base), fields.flag("external"))


def manifest_digest(parts: Sequence[CodedPart], skip: Spec) -> bytes:
    """16 bytes."""
    text = json.dumps([skip.text, _entries(parts)], separators=(",", ":"))
    return bytes.fromhex(document_digest(text.encode()))


def _entries(parts: Sequence[CodedPart]) -> list[dict[str, Any]]:
    return [
        {
            "name": slot.leaf.name,
            "dtype": slot.leaf.dtype,
            "shape": list(slot.leaf.shape),
            "role": slot.leaf.role,
            "codec": part.spec.text,
            "group": slot.group,
        }
        for part in parts
        for slot in part.slots
    ]


def _entry(item: object, path: str) -> tuple[CodedLeaf, Spec, int]:
    fields = Fields(item, path=path)
    leaf = CodedLeaf(fields.text("name"), fields.text("dtype"), fields.dimensions("shape"), fields.text("role"))
    spec = _spec(fields.text("codec"), path)
    if not dtypes.is_known(leaf.dtype) or (spec.is_floats and leaf.dtype != "float32"):
        raise DamagedError(
            f"{path}: leaf {leaf.name!r} of {leaf.dtype!r} cannot be coded as {spec.text}", path=path, leaf=leaf.name
        )
    return leaf, spec, fields.integer("group")


def _spec(text: str, path: str) -> Spec:
    try:
        return parse(text)
    except ConfigError as error:
        raise DamagedError(f"{path}: {error}", path=path, found=text) from None


def _parts(found: Sequence[tuple[CodedLeaf, Spec, int]]) -> tuple[CodedPart, ...]:
    members: dict[Spec, list[tuple[CodedLeaf, int]]] = {}
    for leaf, spec, group in found:
        members.setdefault(spec, []).append((leaf, group))
    return tuple(place(spec, [leaf for leaf, _ in own], [group for _, group in own]) for spec, own in members.items())
