"""Writing a chain: an exact base, then one record for each checkpoint, durable when `append` returns.

Owns:    numbers, when a record is one against the base, when old ones go, and when a new base is due.
Before:  the caller has a state at rest, and `coder` makes sections of it.   After: `replay` brings the last good record
         back.
Holds:   every record is the difference to what readers have, never to the state before: what one leaves out, the next
         ones bring. Older segments are removed only after a skip record is durable, and the newest ones stay. A failed
         append ends the chain: the writer is ahead of the file, and only a new base brings them together again.

    with ChainWriter.start(directory, leaves, state, step=0, deltas=Deltas()) as chain:
        chain.append(1, state)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from stepwell.errors import ConfigError, DamagedError, PersistError
from stepwell.faults import crash_point
from stepwell.storage.chain import chain_document as document
from stepwell.storage.chain import chain_record
from stepwell.storage.chain.chain_document import Document, manifest_digest
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_record import Head, Pieces, body_digest
from stepwell.storage.chain.replay import read_base
from stepwell.storage.chain.section_coder import Coder, Given
from stepwell.storage.chain.segment import BASE_NAME, Appender, list_segments, segment_name, sync_directory
from stepwell.storage.codecs.assignment import CodedLeaf, CodedPart, Deltas, State, arrange
from stepwell.storage.codecs.coding_groups import Facts
from stepwell.storage.codecs.floats import AnyArray
from stepwell.storage.store import no_follow

_SETTLED: Final = 16
"""From this record on the error says something: at first nearly all of a small way is missing."""
_NONE: Final[Mapping[int, Given]] = {}


@dataclass(frozen=True)
class Appended:
    """What became of one checkpoint. kept: part of the quantised entries that got a symbol. error: distance to the
    true state, relative to the way from the base, by a sample. exact_groups: how many held NaN, infinity or the like.
    write_seconds: from the record as it is to a durable one.
    """

    number: int
    step: int
    kind: str
    nbytes: int
    kept: float
    error: float
    exact_groups: int
    reused_tables: int
    write_seconds: float


class ChainWriter:
    """A chain that is being written; `start` makes one."""

    def __init__(self, directory: Path, deltas: Deltas, document: Document, coder: Coder) -> None:
        self._directory, self._deltas, self._document, self._coder = directory, deltas, document, coder
        self._number, self._step, self._digest = 0, document.step, document.base
        self._segment: Appender | None = None
        self._broken: str | None = None
        self._error, self._kept = 0.0, 1.0

    @classmethod
    def start(cls, directory: Path, leaves: Sequence[CodedLeaf], state: State, *, step: int, deltas: Deltas,
              base: Callable[[], State] | None = None, elsewhere: Collection[int] = ()) -> ChainWriter:  # fmt: skip
        """Make the state durable as the base of a new chain, in a directory that does not exist.

        `base`: it is kept elsewhere; gives that state when a skip record needs it, and is not stored here. `elsewhere`:
        numbers of the parts (`arrange`) that every `append` is given coded; what readers have of them is not kept here.
        """
        if sys.byteorder != "little":
            raise ConfigError("chains are written and read on little-endian machines only")
        parts = arrange(leaves, deltas)
        away = {*elsewhere, *(number for number, part in enumerate(parts) if part.is_held)}
        image = ChainImage.of(parts, state, away if base is not None else ())
        about = Document(parts, deltas.skip, step, image.digest(), base is not None)
        no_follow.mkdir(directory)
        crash_point("chain.started")
        if base is None:
            _write_base(directory, about, image)
            image = image.without(away)
        digests = dict(image.away)

        def load() -> ChainImage:
            if base is None:
                return read_base(directory, about).without(away)
            found = ChainImage(about.parts, digests)
            found.fill(found.split(base()))
            if found.digest() != about.base:
                raise DamagedError(
                    f"{directory}: the base is not what it was when the chain began", path=str(directory)
                )
            return found

        _put(directory / document.NAME, about.dump())
        sync_directory(directory.parent)
        return cls(directory, deltas, about, Coder(image, deltas, load, elsewhere))

    def __enter__(self) -> ChainWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more will be appended. What was, is durable."""
        if self._segment is not None:
            self._segment.close()

    @property
    def parts(self) -> tuple[CodedPart, ...]:
        """What a record has sections of."""
        return self._document.parts

    @property
    def is_skip_next(self) -> bool:
        """Whether the next record is one against the base."""
        return bool(self._deltas.skip_every and self._number and self._number % self._deltas.skip_every == 0)

    def append(self, step: int, state: State, note: bytes = b"", given: Mapping[int, Given] = _NONE) -> Appended:
        """Make a checkpoint durable, with a note that readers get back. Leaves of `hold` need not be in the state, nor
        those of parts that are given coded, by their number; for a skip record these are against the base too.

        Raises StateError if the leaves changed: nothing was written, a new base is due. Raises PersistError where it
        could not be written; the chain is over then, and what was durable still is.
        """
        if self._broken is not None:
            raise PersistError(f"{self._directory}: {self._broken}; begin a new base", path=str(self._directory))
        if step <= self._step:
            raise ConfigError(f"step {step} after step {self._step}: a chain goes forward", step=step)
        if len(note) > chain_record.MOST_NOTE_BYTES:
            raise ConfigError(f"a note of {len(note)} bytes; at most {chain_record.MOST_NOTE_BYTES}", found=len(note))
        self._coder.check(given)
        values = self._coder.image.split(state)
        number, is_skip = self._number + 1, self.is_skip_next
        self._broken = "an append was interrupted"  # until it is whole: the coder is ahead of the file
        sections, facts = self._coder.code(values, given, is_skip)
        head, body = self._seal(number, step, [*sections, [chain_record.dump_note(note)]], facts, is_skip)
        started = time.monotonic()
        self._persist(number, head, body, is_skip)
        write_seconds = time.monotonic() - started
        self._number, self._step, self._digest = number, step, head.after
        self._kept = facts.kept / facts.entries if facts.entries else 1.0
        self._error = self._coder.error(values, given)
        self._broken = None
        kind, nbytes = chain_record.KINDS[head.kind], chain_record.HEAD_NBYTES + head.body_nbytes
        return Appended(number, step, kind, nbytes, self._kept, self._error,
                        facts.exact, facts.reused, write_seconds)  # fmt: skip

    def _seal(self, number: int, step: int, sections: list[Pieces], facts: Facts, is_skip: bool) -> tuple[Head, Pieces]:
        body = chain_record.join(sections)
        return Head(
            kind=chain_record.SKIP if is_skip else chain_record.DELTA,
            flags=chain_record.SUSPECT if facts.exact else 0,
            parts=len(self._document.parts),
            number=number,
            step=step,
            parent=0 if is_skip else number - 1,
            manifest=self._document.manifest,
            before=self._document.base if is_skip else self._digest,
            after=self._coder.image.digest(),
            body_nbytes=sum(map(len, body)),
            body_digest=body_digest(*body),
        ), body

    def _persist(self, number: int, head: Head, body: Pieces, is_skip: bool) -> None:
        old = self._segment if is_skip else None
        if self._segment is None or is_skip:
            fresh = Appender(self._directory / segment_name(number))
            fresh.open()
            self._segment = fresh
        self._segment.append(head.dump(), *body)
        if old is not None:
            old.close()
            # The skip record is durable from here on, so what is before it may go.
            with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next one
                for _, path in list_segments(self._directory)[: -self._deltas.keep_segments]:
                    no_follow.unlink(path)

    def refresh(self) -> str | None:
        """Why a new base is due, or None. A change of the leaves, and a restart, ask for one too."""
        limits = self._deltas
        if self._broken is not None:
            return self._broken
        if self._number >= limits.most_records:
            return f"{self._number} records"
        needed = max((no_follow.lstat(path).st_size for _, path in list_segments(self._directory)), default=0)
        if needed > self._document.nbytes:
            return f"a restore has to read {needed} bytes of records, and {self._document.nbytes} of the base"
        if self._number and self._kept < limits.least_kept:
            return f"{self._kept:.2%} of the entries got a symbol"
        if self._number >= _SETTLED and self._error > limits.most_error:
            return f"the error is {self._error:.2f} of the way from the base"
        return None

    def state(self) -> dict[str, AnyArray]:
        """What a reader has after the last record: copies, by name, of what is kept here: held leaves are left out."""
        return {name: value.copy() for name, value in self._coder.image.leaves().items()}


def _write_base(directory: Path, about: Document, image: ChainImage) -> None:
    body = chain_record.join([[array.tobytes()] for array in image.arrays])
    head = Head(chain_record.BASE, 0, len(image.arrays), 0, about.step, 0, manifest_digest(about.parts, about.skip),
                bytes(16), about.base, sum(map(len, body)), body_digest(*body))  # fmt: skip
    file = Appender(directory / BASE_NAME)
    file.open()
    file.append(head.dump(), *body)
    file.close()


def _put(path: Path, data: bytes) -> None:
    """A small file, durable under its name: from here on the chain exists."""
    temporary = path.with_name(f"{path.name}.tmp")
    file = Appender(temporary)
    file.open()
    file.append(data)
    file.close()
    no_follow.rename(temporary, path)
    sync_directory(path.parent)
