"""Which records a chain has, without applying them.

Holds:   only records whose bytes are whole are listed, in the order of their numbers; what is not whole ends a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepwell.codecs.record import Head, cut, load_note
from stepwell.codecs.replay import read_document
from stepwell.codecs.segment import list_segments, read_records
from stepwell.errors import DamagedError


@dataclass(frozen=True)
class Listed:
    """One record. `note`: reads what its writer noted."""

    number: int
    step: int
    nbytes: int
    note: Callable[[], bytes]


def list_records(directory: Path) -> list[Listed]:
    """All records that are whole; a reader may still find that one of them does not fit the one before.

    Raises DamagedError if there is no chain.
    """
    found, most = list[Listed](), read_document(directory).most_record_nbytes
    for _, path in list_segments(directory):
        try:
            for item in read_records(path, most):
                head, body = item.head, item.body
                found.append(Listed(head.number, head.step, len(body), partial(_note, head, body)))
        except DamagedError:
            continue
    return found


def check_records(directory: Path) -> None:
    """Read all of a chain's files. Raises DamagedError, but not for a last record that a crash cut off."""
    most = read_document(directory).most_record_nbytes
    for _, path in list_segments(directory):
        try:
            for _ in read_records(path, most):
                pass
        except DamagedError as error:
            if not error.fields.get("torn"):
                raise


def _note(head: Head, body: memoryview) -> bytes:
    return load_note(cut(body, head.parts + 1)[-1])
