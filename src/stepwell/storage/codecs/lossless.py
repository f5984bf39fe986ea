"""Codecs of bytes (`raw`, `zstd`, `xor`), and `top`, which keeps the top bits of every value.

Owns:    how the leaves of such a part become the bytes of a record, and back.
Holds:   raw, zstd and xor give back every bit, whatever the bits are. Of `top` only zero becomes zero, a sign stays,
         and the relative error of normal numbers is at most 2^-(mantissa + 1). No bytes mean: nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import DamagedError
from stepwell.storage.codecs import zstd_frames
from stepwell.storage.codecs.assignment import CodedPart, CodedSlot
from stepwell.storage.codecs.codec_spec import Raw, Top, XorCodec, Zstd
from stepwell.storage.codecs.floats import AnyArray, Bytes, Floats, Words, is_finite
from stepwell.storage.format import dtypes

_CHUNK: Final = 1 << 14
"""Entries of `top` that are worked on at once, so that what is made of them stays in the cache."""


def encode_bytes(part: CodedPart, values: Sequence[AnyArray], state: Bytes) -> bytes:
    """Code the leaves' bytes and put them into the state."""
    places = [state[slot.start : slot.start + slot.leaf.nbytes] for slot in part.slots]
    if all(np.array_equal(value, place) for value, place in zip(values, places, strict=True)):
        return b""
    spec, pieces = part.spec, []
    for slot, value, place in zip(part.slots, values, places, strict=True):
        changed = np.bitwise_xor(value, place) if isinstance(spec, XorCodec) else value
        pieces.append(changed.tobytes() if isinstance(spec, Raw) else shuffle(changed, _width(slot)))
        place[:] = value
    data = b"".join(pieces)
    return zstd_frames.compress(data, level=spec.level) if isinstance(spec, (Zstd, XorCodec)) else data


def decode_bytes(part: CodedPart, data: memoryview, state: Bytes) -> None:
    """Put what `encode_bytes` made into the state. Raises DamagedError, and then the state is as it was."""
    if not data:
        return
    spec = part.spec
    content = data if isinstance(spec, Raw) else memoryview(zstd_frames.decompress(data, part.size))
    if len(content) != part.size:
        raise DamagedError(f"a part of {part.size} bytes has {len(content)}", expected=part.size, found=len(content))
    for slot in part.slots:
        piece = np.frombuffer(content, np.uint8, slot.leaf.nbytes, slot.start)
        place = state[slot.start : slot.start + slot.leaf.nbytes]
        plain = piece if isinstance(spec, Raw) else unshuffle(piece, _width(slot))
        place[:] = np.bitwise_xor(plain, place) if isinstance(spec, XorCodec) else plain


def shuffle(data: Bytes, width: int) -> bytes:
    """The first bytes of all elements, then the second ones, and so on: exponents come to lie beside each other."""
    columns: Bytes = data.reshape(-1, width).T
    return columns.tobytes()


def unshuffle(data: Bytes, width: int) -> Bytes:
    """Back again."""
    return np.ascontiguousarray(data.reshape(width, -1).T).reshape(-1)


def _width(slot: CodedSlot) -> int:
    return dtypes.itemsize(slot.leaf.dtype)


def encode_top(part: CodedPart, values: Sequence[Floats], state: Floats) -> bytes:
    """Differences of the top bits to those of the state; the state becomes the middles of what these bits leave open.

    The first byte says whether this is so (1), or the values are there as they are (0), because one is not finite.
    """
    spec = part.spec
    assert isinstance(spec, Top)
    places = [state[slot.start : slot.start + slot.leaf.count] for slot in part.slots]
    if not all(is_finite(value) for value in values):
        for value, place in zip(values, places, strict=True):
            place[:] = value
        return b"\0" + state.tobytes()
    from_zero = not is_finite(state)
    low, high = planes = np.empty((2, state.size), np.uint8)
    has_moved = False
    for slot, value, place in zip(part.slots, values, places, strict=True):
        for start in range(0, value.size, _CHUNK):
            here = place[start : start + _CHUNK]
            codes = top_codes(value[start : start + _CHUNK], spec.mantissa)
            shift = codes if from_zero else codes - top_codes(here, spec.mantissa)
            # Zigzag: small differences of both signs become small numbers, with hardly anything in their high bytes.
            zigzag = shift << np.uint16(1) ^ (shift.view(np.int16) >> np.int16(15)).view(np.uint16)
            at = slot.start + start
            np.copyto(low[at : at + here.size], zigzag, casting="unsafe")
            np.copyto(high[at : at + here.size], zigzag >> np.uint16(8), casting="unsafe")
            new = top_values(codes, spec.mantissa)
            has_moved = has_moved or not np.array_equal(new, here)
            here[:] = new
    return b"\1" + zstd_frames.compress(planes.data, level=1) if has_moved else b""


def decode_top(part: CodedPart, data: memoryview, state: Floats) -> None:
    """Put what `encode_top` made into the state. Raises DamagedError, and then the state is as it was."""
    spec = part.spec
    assert isinstance(spec, Top)
    if not data:
        return
    if data[0] == 0:
        if len(data) - 1 != state.nbytes:
            raise DamagedError(f"a part of {state.nbytes} bytes has {len(data) - 1}", expected=state.nbytes)
        state[:] = np.frombuffer(data[1:], np.float32)
        return
    low, high = np.frombuffer(zstd_frames.decompress(data[1:], 2 * state.size), np.uint8).reshape(2, -1)
    from_zero = not is_finite(state)
    for start in range(0, state.size, _CHUNK):
        here = state[start : start + _CHUNK]
        zigzag = low[start : start + _CHUNK] | high[start : start + _CHUNK].astype(np.uint16) << np.uint16(8)
        shift = zigzag >> np.uint16(1) ^ -(zigzag & np.uint16(1))
        codes = shift if from_zero else shift + top_codes(here, spec.mantissa)
        here[:] = top_values(codes, spec.mantissa)


def top_codes(values: Floats, mantissa: int) -> NDArray[np.uint16]:
    """Sign, exponent and the first bits of the mantissa, as a number; 0 for zero only."""
    bits = values.view(np.uint32)
    codes: NDArray[np.uint16] = (bits >> np.uint32(23 - mantissa)).astype(np.uint16)
    has_none = (codes & np.uint16((1 << (8 + mantissa)) - 1)) == 0
    if has_none.any():
        # The smallest subnormal numbers have no top bits: they go up to the least code that is not zero.
        codes[has_none] |= np.uint16(1)
        codes[values == 0] = 0
    return codes


def top_values(codes: NDArray[np.uint16], mantissa: int) -> Floats:
    """The middle of all values with the same top bits."""
    open_bits = 23 - mantissa
    bits: Words = (codes.astype(np.uint32) << np.uint32(open_bits)) | np.uint32(1 << (open_bits - 1))
    if not codes.all():
        bits[codes == 0] = 0
    return bits.view(np.float32)
