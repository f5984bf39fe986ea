"""Codecs of bytes (`raw`, `zstd`, `xor`), and `top`, which keeps the top bits of every value.

Owns:    how the leaves of such a part become the bytes of a record, and back.
Holds:   raw, zstd and xor give back every bit, whatever the bits are. Of `top` only zero becomes zero, a sign stays,
         and the relative error of normal numbers is at most 2^-(mantissa + 1). No bytes mean: nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.codecs import frames
from stepwell.codecs.floats import AnyArray, Bytes, Floats, Words, is_finite
from stepwell.codecs.layout import Part, Slot
from stepwell.codecs.spec import Raw, Top, Xor, Zstd
from stepwell.errors import DamagedError
from stepwell.format import dtypes


def encode_bytes(part: Part, values: Sequence[AnyArray], state: Bytes) -> bytes:
    """Code the leaves' bytes and put them into the state."""
    places = [state[slot.start : slot.start + slot.leaf.nbytes] for slot in part.slots]
    if all(np.array_equal(value, place) for value, place in zip(values, places, strict=True)):
        return b""
    spec, pieces = part.spec, []
    for slot, value, place in zip(part.slots, values, places, strict=True):
        changed = np.bitwise_xor(value, place) if isinstance(spec, Xor) else value
        pieces.append(changed.tobytes() if isinstance(spec, Raw) else shuffle(changed, _width(slot)))
        place[:] = value
    data = b"".join(pieces)
    return frames.compress(data, level=spec.level) if isinstance(spec, (Zstd, Xor)) else data


def decode_bytes(part: Part, data: memoryview, state: Bytes) -> None:
    """Put what `encode_bytes` made into the state. Raises DamagedError, and then the state is as it was."""
    if not data:
        return
    spec = part.spec
    content = data if isinstance(spec, Raw) else memoryview(frames.decompress(data, part.size))
    if len(content) != part.size:
        raise DamagedError(f"a part of {part.size} bytes has {len(content)}", expected=part.size, found=len(content))
    for slot in part.slots:
        piece = np.frombuffer(content, np.uint8, slot.leaf.nbytes, slot.start)
        place = state[slot.start : slot.start + slot.leaf.nbytes]
        plain = piece if isinstance(spec, Raw) else unshuffle(piece, _width(slot))
        place[:] = np.bitwise_xor(plain, place) if isinstance(spec, Xor) else plain


def shuffle(data: Bytes, width: int) -> bytes:
    """The first bytes of all elements, then the second ones, and so on: exponents come to lie beside each other."""
    columns: Bytes = data.reshape(-1, width).T
    return columns.tobytes()


def unshuffle(data: Bytes, width: int) -> Bytes:
    """Back again."""
    return np.ascontiguousarray(data.reshape(width, -1).T).reshape(-1)


def _width(slot: Slot) -> int:
    return dtypes.itemsize(slot.leaf.dtype)


def encode_top(part: Part, values: Sequence[Floats], state: Floats) -> bytes:
    """Differences of the top bits to those of the state; the state becomes the middles of what these bits leave open.

    The first byte says whether this is so (1), or the values are there as they are (0), because one is not finite.
    """
    spec = part.spec
    assert isinstance(spec, Top)
    whole = np.concatenate(values) if values else np.empty(0, np.float32)
    if not is_finite(whole):
        state[:] = whole
        return b"\0" + whole.tobytes()
    codes = top_codes(whole, spec.mantissa)
    shift = codes - top_codes(state, spec.mantissa) if is_finite(state) else codes
    if not shift.any() and is_finite(state) and np.array_equal(top_values(codes, spec.mantissa), state):
        return b""
    state[:] = top_values(codes, spec.mantissa)
    # Zigzag: small differences of both signs become small numbers, in whose high bytes there is hardly anything.
    signed = shift.astype(np.int16)
    zigzag = ((signed << np.int16(1)) ^ (signed >> np.int16(15))).view(np.uint16)
    return b"\1" + frames.compress(shuffle(zigzag.view(np.uint8), 2), level=3)


def decode_top(part: Part, data: memoryview, state: Floats) -> None:
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
    plain = unshuffle(np.frombuffer(frames.decompress(data[1:], 2 * state.size), np.uint8), 2).view(np.uint16)
    signed = (plain >> np.uint16(1)).view(np.int16) ^ -(plain & np.uint16(1)).view(np.int16)
    before = top_codes(state, spec.mantissa) if is_finite(state) else np.zeros(state.size, np.uint32)
    codes = (before.astype(np.uint16) + signed.view(np.uint16)).astype(np.uint32)
    state[:] = top_values(codes, spec.mantissa)


def top_codes(values: Floats, mantissa: int) -> Words:
    """Sign, exponent and the first bits of the mantissa, as a number; 0 for zero only."""
    bits = values.view(np.uint32)
    codes = bits >> np.uint32(23 - mantissa)
    sign = np.uint32(1 << (8 + mantissa))
    is_zero = (bits << np.uint32(1)) == 0
    # The smallest subnormal numbers have no top bits: they go up to the least code that is not zero.
    codes = np.where((codes & ~sign) == 0, codes | np.uint32(1), codes)
    found: Words = np.where(is_zero, np.uint32(0), codes)
    return found


def top_values(codes: Words, mantissa: int) -> Floats:
    """The middle of all values with the same top bits."""
    open_bits = 23 - mantissa
    bits = (codes << np.uint32(open_bits)) | np.uint32(1 << (open_bits - 1))
    found: Words = np.where(codes == 0, np.uint32(0), bits)
    return found.view(np.float32)
