"""A part that was coded elsewhere, on its way to who writes the chain: symbols as they are, everything else as facts.

Before:  `device` made the symbols, in memory that both processes have.   After: `chain` is given the part.
Holds:   `load(part, dump(given), symbols)` gives a part that makes the same record. The symbols are not copied.
"""

from __future__ import annotations

import json
import struct
from dataclasses import astuple

from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs.assignment import CodedPart
from stepwell.storage.codecs.coding_groups import AGAIN, EXACT, FRESH, SAME, Coded, Facts, group_nbytes
from stepwell.storage.codecs.floats import Bytes
from stepwell.storage.codecs.sparse import Sparse, marks_nbytes
from stepwell.storage.codecs.tables import stored_bits

_LENGTH = struct.Struct("<Q")


def dump(given: Given) -> bytes:
    """All but the symbols."""
    coded = given.coded
    facts = {"facts": astuple(coded.facts), "digest": given.digest.hex(), "error": [given.missing, given.way]}
    sparse = None if coded.sparse is None else [coded.sparse.nbytes, coded.sparse.values.size]
    text = json.dumps({**facts, "heads": coded.heads.hex(), "sparse": sparse}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *coded.exact])


def load(part: CodedPart, data: Bytes, symbols: Bytes) -> Given:
    """data: from `dump` on, perhaps more. symbols: of all groups, whether they are used or not; or marks and values, if
    they are sparse.
    """
    start = _LENGTH.size
    end = start + _LENGTH.unpack(data[:start].tobytes())[0]
    found = json.loads(data[start:end].tobytes())
    heads, bits = bytearray.fromhex(found["heads"]), stored_bits(part.spec)
    coded = Coded(heads, facts=Facts(*found["facts"]))
    spans, position = [slice(0, 0)], 0
    for kind, slots in zip(_kinds(heads), part.groups(), strict=True):
        coded.is_same = coded.is_same and kind == SAME
        nbytes = group_nbytes(slots, bits)
        if kind in (FRESH, AGAIN):
            is_next = spans[-1].stop == position
            spans[-1:] = [slice(spans[-1].start, position + nbytes)] if is_next else [
                spans[-1], slice(position, position + nbytes)
            ]  # fmt: skip
        elif kind == EXACT:
            for slot in slots:
                coded.exact.append(data[end : end + slot.leaf.nbytes].tobytes())
                end += slot.leaf.nbytes
        position += nbytes
    if found["sparse"] is None:
        coded.packed = [symbols[span] for span in spans]
    else:
        nbytes, count = found["sparse"]
        start = marks_nbytes(nbytes)
        coded.sparse = Sparse(nbytes, symbols[:start], symbols[start : start + count])
    return Given(coded, bytes.fromhex(found["digest"]), *found["error"])


def _kinds(heads: bytearray) -> list[int]:
    """The kind of each group; a fresh one is followed by its table."""
    found, place = [], 0
    while place < len(heads):
        found.append(heads[place])
        place += 2 + 2 * heads[place + 1] if heads[place] == FRESH else 1
    return found
