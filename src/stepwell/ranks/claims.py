"""What the ranks say of their leaves, so small that rank 0 can hold what all of them say.

Owns:    the claims of one rank, how they travel, and how rank 0 keeps them.
Not:     the verdict (sharing), the tensors and their digests (state.share).
Holds:   many leaves of a rank have the same form (a layer is like the next one), so forms travel once and leaves name
         them by number. What several ranks say in the same words, rank 0 keeps once: such parts are the same object.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box
from stepwell.storage.format.checksum import block_digest

Message = dict[str, Any]
DIGEST_BYTES: Final = 8
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Of content that was not looked at: it is equal to nothing, not even to itself on another rank."""
_MOST_BYTES: Final = 256 << 20
"""One packed text, unpacked: a state of a million leaves has a tenth of that."""


class Form(NamedTuple):
    """What a rank holds under a name, but for the content: a box of a tensor of `global_shape`.

    mesh:      whom it was sharded over, as a digest
    is_still:  nobody changes it: it is written once, and what is written each time is shared evenly without it
    """

    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    mesh: str = ""
    is_still: bool = False

    @property
    def is_part(self) -> bool:
        """Less than the whole tensor: it was sharded on purpose, so the tensor belongs to all."""
        return self.box != Box.whole(self.global_shape)

    @property
    def row_bytes(self) -> int:
        return self.box.numel * dtypes.itemsize(self.dtype) // max(1, self.box.row_count)

    @property
    def seen(self) -> Seen:
        """As rank 0 sees it, without the box."""
        kind = f"{self.dtype} {_numbers(self.global_shape)}"
        return Seen(kind, self.mesh, self.is_part, not self.box.numel, self.is_still)

    @property
    def place(self) -> bytes:
        """Which box it is, in 8 bytes."""
        text = f"{_numbers(self.box.offsets)} {_numbers(self.box.shape)}"
        return bytes.fromhex(block_digest(text.encode()))


class Seen(NamedTuple):
    """What forms have in common on many ranks, as much of it as the verdict needs. Equal texts are equal things."""

    kind: str
    mesh: str
    is_part: bool
    is_empty: bool
    is_still: bool


@dataclass(frozen=True)
class Claims:
    """All that one rank holds: names in order, for each the number of its form, and digests of the content."""

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    column: tuple[int, ...]
    digests: bytes

    @classmethod
    def of(cls, held: Mapping[str, tuple[Form, bytes]]) -> Claims:
        """`held`: of each leaf its form, and the digest of its content or NO_DIGEST."""
        names = tuple(sorted(held))
        numbers: dict[Form, int] = {}
        column = tuple(numbers.setdefault(held[name][0], len(numbers)) for name in names)
        return cls(names, tuple(numbers), column, b"".join(held[name][1] for name in names))

    @cached_property
    def leaves(self) -> list[tuple[str, Form]]:
        """Names and forms, in order."""
        return [(name, self.forms[number]) for name, number in zip(self.names, self.column, strict=True)]

    def dump(self) -> Message:
        """As they travel."""
        return {
            "names": pack(json.dumps(self.names).encode()),
            "forms": pack(json.dumps([form.seen for form in self.forms]).encode()),
            "boxes": pack(b"".join(form.place for form in self.forms)),
            "column": pack(pack_numbers(self.column)),
            "digests": pack(self.digests),
        }


class Heard(NamedTuple):
    """The claims of one rank, as rank 0 keeps them: what has 8 bytes for each form or leaf stays bytes."""

    names: tuple[str, ...]
    forms: tuple[Seen, ...]
    column: tuple[int, ...]
    boxes: bytes
    digests: bytes


class Listener:
    """Turns messages into claims. What was heard before is the same object again."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def hear(self, message: Message) -> Heard:
        """The claims in a message that `Claims.dump` made. Raises ValueError for any other."""
        names = self._once(message["names"], lambda data: tuple(json.loads(data)))
        forms = self._once(message["forms"], lambda data: tuple(Seen(*values) for values in json.loads(data)))
        column = self._once(message["column"], unpack_numbers)
        boxes, digests = unpack(message["boxes"]), unpack(message["digests"])
        counts = [len(names), len(column), len(digests) // DIGEST_BYTES]
        if len(set(counts)) > 1 or len(boxes) != len(forms) * DIGEST_BYTES or max(column, default=-1) >= len(forms):
            raise ValueError(f"{counts} names, numbers and digests of leaves, and {len(forms)} forms")
        return Heard(
            names, forms, column, self._known.setdefault(boxes, boxes), self._known.setdefault(digests, digests)
        )

    def _once(self, text: str, load: Callable[[bytes], Any]) -> Any:
        if text not in self._known:
            self._known[text] = load(unpack(text))
        return self._known[text]


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def pack(data: bytes) -> str:
    """Bytes as a short text."""
    return base64.b64encode(zlib.compress(data, 1)).decode()


def unpack(text: str) -> bytes:
    """What was packed. Raises ValueError."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a packed text: {error}") from error
    if not inflater.eof:
        raise ValueError(f"a packed text that has no end within {_MOST_BYTES} bytes")
    return data


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Numbers below 2^32, in the same bytes on every machine."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_numbers(data: bytes) -> tuple[int, ...]:
    """The numbers again. Raises ValueError."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no numbers of 4 bytes")
    return struct.unpack(f"<{len(data) // 4}I", data)
