"""Which records a chain has, without applying them.

Holds:   heads alone are read, however large the records are: a reader may still find that one of them is not whole, or
         does not fit the one before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stepwell.errors import DamagedError
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head, body_digest, cut, load_note
from stepwell.storage.chain.replay import read_document
from stepwell.storage.chain.segment import list_segments, read_records
from stepwell.storage.store import no_follow


@dataclass(frozen=True)
class Listed:
    """One record: its head, and where its body lies."""

    head: Head
    path: Path
    start: int

    @property
    def number(self) -> int:
        return self.head.number

    @property
    def step(self) -> int:
        return self.head.step

    @property
    def nbytes(self) -> int:
        return HEAD_NBYTES + self.head.body_nbytes

    def note(self) -> bytes:
        """What its writer noted. Raises DamagedError."""
        with _open(self.path) as file:
            file.seek(self.start)
            body = file.read(self.head.body_nbytes)
        if len(body) != self.head.body_nbytes or body_digest(body) != self.head.body_digest:
            raise DamagedError(f"{self.path}: record {self.number} is not whole", path=str(self.path))
        return load_note(cut(memoryview(body), self.head.parts + 1)[-1])


def list_records(directory: Path) -> list[Listed]:
    """All records, in the order of their numbers. Raises DamagedError if there is no chain."""
    most = read_document(directory).most_record_nbytes
    return [item for _, path in list_segments(directory) for item in _list_file(path, most)]


def _list_file(path: Path, most: int) -> Iterator[Listed]:
    try:
        with _open(path) as file:
            start, end = 0, os.fstat(file.fileno()).st_size
            while start + HEAD_NBYTES <= end:
                file.seek(start)
                head = Head.load(file.read(HEAD_NBYTES), path=str(path))
                start += HEAD_NBYTES
                if head.body_nbytes > min(most, end - start):
                    return  # cut off
                yield Listed(head, path, start)
                start += head.body_nbytes
    except DamagedError:
        return


def _open(path: Path) -> BinaryIO:
    try:
        return open(no_follow.open_file(path, os.O_RDONLY), "rb")
    except OSError as error:
        raise DamagedError(f"{path}: cannot be opened: {error.strerror}", path=str(path)) from None


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
