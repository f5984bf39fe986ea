"""JSON documents that may be damaged or forged: bounded, without duplicate keys, closed by their own checksum.

Owns:    the one way a small file is parsed and sealed.
Holds:   no document is believed before its checksum matched; what is written can be read; errors name the file.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from stepwell.errors import DamagedError, StateError
from stepwell.storage.format.checksum import document_digest

MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Of a record, the largest document. Parsing takes up to thirty times as much memory."""
MAX_DIMENSIONS: Final = 1024
"""Of a tensor."""
_RUN_ID: Final = re.compile(r"[0-9a-f]{16}")


def parse_json(data: bytes, *, path: str) -> Any:
    """Parse strictly: UTF-8, no duplicate keys, only finite numbers, bounded depth."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise DamagedError(f"{path}: the key {twice!r} stands twice", path=path, key=twice)
        return found

    def constant(name: str) -> NoReturn:
        raise DamagedError(f"{path}: {name} is not allowed", path=path)

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text[:32])  # 1e999

    if len(data) > MAX_DOCUMENT_BYTES:
        raise DamagedError(f"{path}: {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}", path=path, found=len(data))
    try:
        return json.loads(data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except RecursionError:
        raise DamagedError(f"{path}: nested too deeply", path=path) from None
    except ValueError as error:
        raise DamagedError(f"{path}: not valid JSON: {error}", path=path) from None


def seal(document: dict[str, Any]) -> bytes:
    """Bytes of a document with its own checksum as the last key. Raises StateError if it is too large to be read."""
    body = json.dumps(document, separators=(",", ":")).encode()
    if len(body) + 64 > MAX_DOCUMENT_BYTES:
        raise StateError(
            f"{document['format']} of {len(body)} bytes, more than {MAX_DOCUMENT_BYTES}: too many tensors "
            "or plain values; store long lists of numbers as tensors",
            expected=MAX_DOCUMENT_BYTES,
            found=len(body),
        )
    return body[:-1] + f',"checksum":"{document_digest(body)}"}}\n'.encode()


def unseal(data: bytes, *, path: str, kind: str) -> dict[str, Any]:
    """The document behind `seal`, after its checksum and kind were checked."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DamagedError(f"{path}: {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}", path=path, found=len(data))
    body, mark, tail = data.rpartition(b',"checksum":"')
    digest = document_digest(body + b"}")
    if not mark or tail != f'{digest}"}}\n'.encode():
        found = tail[:32].decode("ascii", "replace") if mark else "none"
        raise DamagedError(f"{path}: checksum {found}, content has {digest}", path=path, expected=digest, found=found)
    document = parse_json(data, path=path)
    if not isinstance(document, dict) or document.get("format") != kind:
        other = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise DamagedError(
            f"{path}: format {other!r}, this version reads {kind!r}", path=path, expected=kind, found=other
        )
    return document


class Fields:
    """Typed access to a parsed document: a missing or wrong field is damage with its name."""

    def __init__(self, document: object, *, path: str) -> None:
        if not isinstance(document, dict):
            raise DamagedError(f"{path}: expected an object, found {type(document).__name__}", path=path)
        self._document = document
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._document

    def _fail(self, key: str, expected: str) -> NoReturn:
        found = self._document.get(key)
        raise DamagedError(
            f"{self._path}: field {key!r} is {type(found).__name__}, expected {expected}", path=self._path, key=key
        )

    def integer(self, key: str, *, limit: int = 1 << 62) -> int:
        """A whole number in [0, limit)."""
        value = self._document.get(key)
        if type(value) is not int or not 0 <= value < limit:
            self._fail(key, f"a whole number below {limit}")
        return value

    def number(self, key: str) -> float:
        """Any finite number."""
        value = self._document.get(key)
        if type(value) is float and math.isfinite(value):
            return value
        if type(value) is not int or abs(value) >= 1 << 62:
            self._fail(key, "a number")
        return float(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self._document.get(key)
        if not isinstance(value, str):
            self._fail(key, "text")
        return value

    def run_id(self, key: str) -> str:
        """The id of a run: it becomes part of a socket's address."""
        value = self.text(key)
        if not _RUN_ID.fullmatch(value):
            self._fail(key, "16 hex digits")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._document.get(key)
        if not isinstance(value, bool):
            self._fail(key, "true or false")
        return value

    def optional_flag(self, key: str) -> bool:
        """True or false; false if it is not there."""
        return self.flag(key) if key in self._document else False

    def optional_text(self, key: str) -> str | None:
        """A string or null."""
        return None if self._document.get(key) is None else self.text(key)

    def items(self, key: str) -> list[Any]:
        """A list."""
        value = self._document.get(key)
        if not isinstance(value, list):
            self._fail(key, "a list")
        return value

    def shape(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.items(key)
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
            self._fail(key, "a list of whole numbers")
        return tuple(value)

    def dimensions(self, key: str) -> tuple[int, ...]:
        """The same, of a tensor: few enough that multiplying them takes no time."""
        value = self.shape(key)
        if len(value) > MAX_DIMENSIONS:
            self._fail(key, f"at most {MAX_DIMENSIONS} whole numbers")
        return value

    def optional(self, key: str, default: Any) -> Any:
        """The value as it is, or what stands for a missing one."""
        return self._document.get(key, default)

    def raw(self, key: str) -> Any:
        """The value as it is; a missing key is damage."""
        if key not in self._document:
            self._fail(key, "a value")
        return self._document[key]
