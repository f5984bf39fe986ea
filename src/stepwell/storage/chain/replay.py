"""Reading a chain back: the base, the newest skip record that is good, and the records after it as far as they are.

Owns:    the order of reading, and every check on the way.
Holds:   a record is applied only if its bytes have their checksum and it says that it is for the state that the one
         before says it leads to; what is given back has the digest that the last record says. The first record that is
         not good ends the chain at the one before; the answer says where and why. The result never holds half of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from stepwell.errors import ConfigError, DamagedError
from stepwell.storage.chain import chain_document, chain_record
from stepwell.storage.chain.apply_threads import Ahead, Crew, all_threads
from stepwell.storage.chain.chain_document import Document
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head
from stepwell.storage.chain.segment import BASE_NAME, SegmentRecord, list_segments, read_records
from stepwell.storage.codecs.floats import AnyArray
from stepwell.storage.codecs.parts import Memory, Move, apply, read
from stepwell.storage.store import no_follow

if TYPE_CHECKING:
    import torch

_MOST_DOCUMENT_BYTES: Final = 64 << 20
_LARGE_NBYTES: Final = 64 << 20
"""From here on threads that take digests are worth it, and a device."""
Fill = Callable[[dict[str, AnyArray]], None]
"""Puts the state of a base into its leaves, by name: float32 with their shape, everything else as bytes. If something
is wrong it is asked again, and what the leaves hold then is of no use.
"""
_MOST_BATCH, _MOST_BATCH_BYTES = 64, 1 << 29
"""Records that are applied together, and the memory they may take for it, with what is unpacked of them; as much again
for those that are read meanwhile. One is always taken.
"""


@dataclass(frozen=True)
class Restored:
    """The last good state, and the note of its record. number 0 is the base, which has none. `stopped`: why it is not a
    later one, or None if all records are good; `is_torn`: that looks like a crash while the last record was written,
    and no durable record is lost by it.
    """

    number: int
    step: int
    is_exact: bool
    leaves: dict[str, AnyArray]
    digest: bytes
    stopped: str | None = None
    is_torn: bool = False
    replayed: int = 0
    note: bytes = b""


@dataclass
class _Attempt:
    image: ChainImage
    number: int
    step: int
    digest: bytes
    replayed: int
    note: bytes = b""
    is_half: bool = False
    error: DamagedError | None = None


def read_document(directory: Path) -> Document:
    """What the chain in a directory is of. Raises DamagedError."""
    path = directory / chain_document.NAME
    try:
        with open(no_follow.open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MOST_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}; there is no chain", path=str(path)) from None
    return Document.load(data, path=str(path))


def read_base(directory: Path, about: Document) -> ChainImage:
    """The exact base, checked. Raises DamagedError."""
    path = directory / BASE_NAME
    expected = HEAD_NBYTES + 8 * len(about.parts) + about.nbytes
    try:
        found_nbytes = no_follow.lstat(path).st_size
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}", path=str(path)) from None
    if found_nbytes != expected:  # before anything is allocated for it
        raise DamagedError(f"{path}: {found_nbytes} bytes, expected {expected}", path=str(path), expected=expected)
    (found,) = list(read_records(path, about.most_record_nbytes))
    if found.head.kind != chain_record.BASE or found.head.manifest != about.manifest:
        raise DamagedError(f"{path}: not the base of this chain", path=str(path))
    image = ChainImage(about.parts)
    for array, section in zip(image.arrays, chain_record.cut(found.body, len(about.parts)), strict=True):
        if len(section) != array.nbytes:
            raise DamagedError(f"{path}: a part has {len(section)} bytes, not {array.nbytes}", path=str(path))
        array[:] = np.frombuffer(section, array.dtype)
    _check(image, about.base, str(path))
    return image


def restore(directory: Path, *, base: Fill | None = None, until: int | None = None) -> Restored:
    """The newest good state of a chain, or of its records up to number `until`.

    `base`: for a chain that does not hold it. Raises DamagedError if there is no chain or its base is not good;
    anything else that is wrong shortens the result, and is told in it.
    """
    if sys.byteorder != "little":
        raise ConfigError("chains are written and read on little-endian machines only")
    about = read_document(directory)
    if about.is_external and base is None:
        raise ConfigError(f"{directory}: the base of this chain is kept elsewhere; base= has to fill its leaves")

    load, device = _loader(directory, about, base), _device(about)
    problems: list[DamagedError] = []
    segments = [(first, path) for first, path in list_segments(directory) if until is None or first <= until]
    for first, path in reversed(segments):
        attempt = _replay(about, path, first, load, until, device)
        if attempt.error is not None:
            problems.append(attempt.error)
        elif problems and attempt.number + 1 != _first_of(problems[-1]):
            missing = f"records {attempt.number + 1} to {_first_of(problems[-1]) - 1} are missing"
            problems.append(DamagedError(f"{path}: {missing}", path=str(path), torn=False))
        if attempt.number:
            return _result(about, attempt, problems)
    return _result(about, _Attempt(load(), 0, about.step, about.base, 0), problems)


def _loader(directory: Path, about: Document, base: Fill | None) -> Callable[[], ChainImage]:
    """What gives the base, checked. Only one state is in memory: what was given before is of no use then."""
    held = [number for number, part in enumerate(about.parts) if part.is_held]  # no record changes these
    room: list[ChainImage] = []

    def load() -> ChainImage:
        if base is None:
            return read_base(directory, about)
        image = room[0] if room else ChainImage(about.parts)
        room[:] = [image]
        image.threads = all_threads() if about.nbytes >= _LARGE_NBYTES else 1
        image.away.clear()
        base(image.leaves())
        image.settle(held)
        _check(image, about.base, "the base that was given")
        return image

    return load


def _replay(about: Document, path: Path, first: int, load: Callable[[], ChainImage], until: int | None,
            device: torch.device | None) -> _Attempt:  # fmt: skip
    """As far as one segment goes.

    Many records are applied at once, and the digest is taken of the last state alone. Only if something is wrong is
    every state looked at, to find the first that is not good; what that left half applied is made again without it.
    """
    error, check_each = None, False
    while True:
        records = read_records(path, about.most_record_nbytes)
        with Ahead(records, lambda found: len(found.body), _MOST_BATCH_BYTES) as ahead:  # while the base is read
            attempt = _advance(about, path, first, load(), ahead, until, check_each, device)
        if device is not None:
            _give_back(device)
        attempt.error = error = attempt.error or error
        if not attempt.number and (check_each or not attempt.is_half):
            return attempt
        if not attempt.is_half and (check_each or attempt.image.digest() == attempt.digest):
            return attempt
        until, check_each = attempt.number if check_each else until, True


class _Batch:
    """Records that were read and are yet to be applied, together."""

    def __init__(self, about: Document, device: torch.device | None) -> None:
        self._about, self._device = about, device
        self._memories = [Memory() for _ in about.parts]
        self._moves: list[list[Move]] = []
        self._nbytes = 0
        self.is_skip = False

    @property
    def is_full(self) -> bool:
        return len(self._moves) >= _MOST_BATCH or self._nbytes >= _MOST_BATCH_BYTES

    def add(self, found: SegmentRecord) -> bytes:
        """The next one. Returns its note. Raises DamagedError."""
        about, is_skip = self._about, found.head.kind == chain_record.SKIP
        *sections, note = chain_record.cut(found.body, found.head.parts + 1)
        parts = [part.for_skip(about.skip) if is_skip else part for part in about.parts]
        moves = [read(*each) for each in zip(parts, sections, self._memories, strict=True)]
        noted = chain_record.load_note(note)
        self._moves.append(moves)
        self._nbytes += len(found.body) + sum(move.nbytes for move in moves)
        self.is_skip = is_skip
        if is_skip:
            self._memories = [Memory() for _ in about.parts]
        return noted

    def apply(self, image: ChainImage) -> None:
        """Raises DamagedError; what the image holds then is of no use."""

        def work(number: int) -> None:
            part = self._about.parts[number]
            chosen = part.for_skip(self._about.skip) if self.is_skip else part
            apply(chosen, [moves[number] for moves in self._moves], image.arrays[number], self._device)

        with Crew(image.threads) as crew:
            for _ in crew.each(work, range(len(self._about.parts))):
                pass
        self._moves, self._nbytes = [], 0


def _device(about: Document) -> torch.device | None:
    """What records are applied on, if this process has one and they are large."""
    if about.nbytes < _LARGE_NBYTES or "torch" not in sys.modules:
        return None
    from stepwell.storage.chain.apply_on_device import find_device

    return find_device()


def _give_back(device: torch.device) -> None:
    from stepwell.storage.chain.apply_on_device import give_back

    give_back(device)


def _advance(about: Document, path: Path, first: int, image: ChainImage, records: Iterable[SegmentRecord],
             until: int | None, check_each: bool, device: torch.device | None) -> _Attempt:  # fmt: skip
    done, at = _Attempt(image, 0, about.step, about.base, 0), _Attempt(image, 0, about.step, about.base, 0)
    batch, expected = _Batch(about, device), first

    def apply_all() -> None:
        done.is_half = True
        batch.apply(image)
        if check_each:
            _check(image, at.digest, str(path))
        done.number, done.step, done.digest, done.note, done.replayed = (
            at.number, at.step, at.digest, at.note, at.replayed
        )  # fmt: skip
        done.is_half = False

    try:
        try:
            for found in records:
                _check_place(about, found.head, expected, at, str(path))
                at.note = batch.add(found)
                at.number, at.step, at.digest, at.replayed = (
                    expected, found.head.step, found.head.after, at.replayed + 1
                )  # fmt: skip
                # A skip record has codecs of its own.
                if check_each or batch.is_skip or batch.is_full:
                    apply_all()
                if expected == until:
                    break
                expected += 1
            if not at.number:
                raise DamagedError(f"{path}: the file is empty", path=str(path), torn=True)
        finally:
            if at.number > done.number and not done.is_half:
                apply_all()
    except DamagedError as error:
        torn = bool(error.fields.get("torn", False))
        done.error = DamagedError(f"record {expected}: {error}", path=str(path), torn=torn, number=expected)
    return done


def _check_place(about: Document, head: Head, expected: int, done: _Attempt, path: str) -> None:
    is_first = done.number == 0
    is_skip = head.kind == chain_record.SKIP
    if head.number != expected:
        raise DamagedError(f"{path}: record {head.number} in its place", path=path, expected=expected)
    if is_skip != (is_first and expected != 1) or head.kind == chain_record.BASE:
        raise DamagedError(f"{path}: a {chain_record.KINDS[head.kind]} record where none belongs", path=path)
    if (
        head.manifest != about.manifest
        or head.parts != len(about.parts)
        or head.parent != (0 if is_skip else expected - 1)
    ):
        raise DamagedError(f"{path}: it belongs to another chain", path=path)
    if head.before != done.digest or head.step <= done.step:
        raise DamagedError(f"{path}: it is for another state than the one before it", path=path)


def _check(image: ChainImage, expected: bytes, path: str) -> None:
    found = image.digest()
    if found != expected:
        raise DamagedError(
            f"{path}: the state has the digest {found.hex()}, not {expected.hex()}",
            path=path, expected=expected.hex(), found=found.hex(),
        )  # fmt: skip


def _first_of(problem: DamagedError) -> int:
    number = problem.fields.get("number", 0)
    assert isinstance(number, int)
    return number


def _result(about: Document, attempt: _Attempt, problems: list[DamagedError]) -> Restored:
    leaves = attempt.image.leaves()
    is_exact = attempt.number == 0 or all(part.spec.is_exact for part in about.parts)
    stopped = f"stopped after record {attempt.number}: {'; '.join(map(str, problems))}" if problems else None
    is_torn = bool(problems) and all(problem.fields.get("torn") for problem in problems)
    return Restored(attempt.number, attempt.step, is_exact, leaves, attempt.digest, stopped, is_torn,
                    attempt.replayed, attempt.note)  # fmt: skip
