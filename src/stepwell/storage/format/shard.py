"""The layout of a shard: a safetensors file whose data starts on a page boundary.

Owns:    where each leaf lies, the header bytes, and the check of a header that somebody else may have forged.
Not:     reading or writing files (agent, restore).
Holds:   the header is padded with spaces to a multiple of 4096 bytes; leaves follow without gaps, widest element
         type first, so each is naturally aligned; nothing follows the last leaf.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.storage.format import dtypes
from stepwell.storage.format.document import MAX_DIMENSIONS, parse_json

PAGE: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of stock safetensors."""


@dataclass(frozen=True)
class LeafSpec:
    """What has to be stored: a name that is unique in the shard, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return dtypes.element_count(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True)
class Placement:
    """Where a leaf lies, counted from the start of the file."""

    spec: LeafSpec
    start: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """A whole shard: header bytes (prefix included), the leaves in file order, and the size of the file."""

    header: bytes
    placements: tuple[Placement, ...]
    nbytes: int


def lay_out(specs: Iterable[LeafSpec], metadata: dict[str, str] | None = None) -> ShardLayout:
    """Place leaves in a file. The order depends only on element size and the order given.

    `metadata` adds to what the header says of the whole file.
    """
    ordered = sorted(specs, key=lambda spec: -dtypes.itemsize(spec.dtype))
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), "format": "pt", "writer": "stepwell"}}
    offsets, end = [], 0
    for spec in ordered:
        start, end = end, end + spec.nbytes
        stored, shape = dtypes.stored_as(spec.dtype, spec.shape)
        if spec.name in header:
            raise ValueError(f"two leaves are called {spec.name!r}")
        header[spec.name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
        offsets.append((spec, start, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(ordered)} leaves need a header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    data_start = len(text) + 8
    placed = tuple(Placement(spec, data_start + start, data_start + stop) for spec, start, stop in offsets)
    return ShardLayout(struct.pack("<Q", len(text)) + text, placed, data_start + end)


def header_bytes(prefix: bytes, file_bytes: int, *, path: str) -> int:
    """Length of the header (prefix included), checked against the file before anything is allocated."""
    if len(prefix) < 8:
        raise DamagedError(f"{path}: {len(prefix)} bytes, too short for a shard", path=path, found=len(prefix))
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > MAX_HEADER_BYTES or length + 8 > file_bytes:
        raise DamagedError(
            f"{path}: header claims {length} bytes in a file of {file_bytes}",
            path=path,
            expected=file_bytes,
            found=length,
        )
    return int(length) + 8


def parse_header(header: bytes, file_bytes: int, *, path: str) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Leaf name -> (stored dtype, stored shape, start, end in the file). Refuses gaps, overlaps and bad lengths."""
    document = parse_json(header[8:], path=path)
    if not isinstance(document, dict):
        raise DamagedError(f"{path}: the header is no JSON object", path=path)
    data_start, found = len(header), {}
    for name, entry in document.items():
        if name == "__metadata__":
            continue
        found[name] = _entry(name, entry, data_start, path)
    position = data_start
    for name, (_, _, start, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if start != position:
            raise DamagedError(f"{path}: leaf {name!r} starts at {start}, expected {position}", path=path, leaf=name)
        position = end
    if position != file_bytes:
        raise DamagedError(
            f"{path}: leaves end at {position}, the file has {file_bytes} bytes",
            path=path,
            expected=position,
            found=file_bytes,
        )
    return found


def _entry(name: str, entry: object, data_start: int, path: str) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        bits = dtypes.STORED_BITS[dtype]
        whole = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, start, end))
        if len(shape) > MAX_DIMENSIONS or not whole or end - start != dtypes.element_count(tuple(shape)) * bits // 8:
            raise ValueError("lengths do not agree")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path}: header entry of leaf {name!r} is not valid: {error}", path=path, leaf=name
        ) from None
    return dtype, tuple(shape), data_start + start, data_start + end
