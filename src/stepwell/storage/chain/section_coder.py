"""The sections of a record: parts that are coded here, beside the readers' state of them, and parts that come coded.

Owns:    the writer's copy of the readers' state, tables and dictionaries, and how far that state is from the true one.
Before:  `chain` decides what kind of record is due.   After: `chain` seals the sections and makes them durable.
Holds:   after `code` the state here, with the digests of what came coded, is what readers have of that record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from stepwell.errors import ConfigError
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_record import Pieces
from stepwell.storage.codecs.assignment import CodedPart, Deltas
from stepwell.storage.codecs.coding_groups import Coded, Facts
from stepwell.storage.codecs.floats import AnyArray
from stepwell.storage.codecs.parts import Memory, code, seal

_MOST_SAMPLES: Final = 1 << 16


@dataclass(frozen=True)
class Given:
    """A part that was quantised elsewhere. digest: of the state that its symbols lead to. missing, way: sums of squares
    over a sample, of what that state lacks and of how far the true one is from the base.
    """

    coded: Coded
    digest: bytes
    missing: float = 0.0
    way: float = 0.0


class Coder:
    """Constructing samples the base, which the image holds."""

    def __init__(
        self, image: ChainImage, deltas: Deltas, load_base: Callable[[], ChainImage], elsewhere: Collection[int]
    ) -> None:
        self.image, self._deltas, self._load_base = image, deltas, load_base
        self._elsewhere = frozenset(elsewhere)
        self._samples = _samples(image)
        self.memories = [Memory() for _ in image.parts]

    def check(self, given: Mapping[int, Given]) -> None:
        """Raises ConfigError unless exactly the parts that are coded elsewhere are given."""
        if set(given) != self._elsewhere:
            raise ConfigError(
                f"parts {sorted(given)} came coded, expected {sorted(self._elsewhere)}",
                expected=sorted(self._elsewhere),
            )

    def code(
        self, values: Sequence[Sequence[AnyArray]], given: Mapping[int, Given], is_skip: bool
    ) -> tuple[list[Pieces], Facts]:
        """Sections of all parts. A skip record is against the base."""
        if is_skip:
            self.image, self.memories = self._load_base(), [Memory() for _ in self.image.parts]
        sections, total = [], Facts()
        for number, part in enumerate(self.image.parts):
            chosen = part.for_skip(self._deltas.skip) if is_skip else part
            section, facts = self._code(number, chosen, values[number], given.get(number), is_skip)
            sections.append(section)
            total.add(facts)
        if is_skip:  # its tables are another codec's
            self.memories = [Memory() for _ in self.image.parts]
        return sections, total

    def _code(
        self, number: int, part: CodedPart, values: Sequence[AnyArray], given: Given | None, is_skip: bool
    ) -> tuple[Pieces, Facts]:
        memory, reuse = self.memories[number], self._deltas.reuse_tables and not is_skip
        dictionary_bytes = 0 if is_skip else self._deltas.dictionary_bytes
        if given is None:
            array = self.image.arrays[number]
            return code(part, values, array, memory, reuse=reuse, dictionary_bytes=dictionary_bytes)
        self.image.away[number] = given.digest
        return seal(part, given.coded, memory, reuse=reuse, dictionary_bytes=dictionary_bytes), given.coded.facts

    def error(self, values: Sequence[Sequence[AnyArray]], given: Mapping[int, Given]) -> float:
        """Distance of the readers' state to the true one, relative to the way from the base, by a sample."""
        missing = sum(part.missing for part in given.values())
        way = sum(part.way for part in given.values())
        for sample in self._samples:
            slot = self.image.parts[sample.part].slots[sample.slot]
            truth = values[sample.part][sample.slot][:: sample.stride].astype(np.float64)
            place = self.image.arrays[sample.part][slot.start : slot.start + slot.leaf.count : sample.stride]
            with np.errstate(invalid="ignore"):  # a state that holds infinity has no error to speak of
                missing += float(np.square(truth - place).sum())
                way += float(np.square(truth - sample.base).sum())
        return math.sqrt(missing / way) if way else 0.0


class _Sample(NamedTuple):
    """Some entries of a leaf as they were in the base."""

    part: int
    slot: int
    stride: int
    base: AnyArray


def sample_stride(entries: int) -> int:
    """Every how many entries one is looked at."""
    return max(1, entries // _MOST_SAMPLES)


def _samples(image: ChainImage) -> list[_Sample]:
    """Of every leaf that is quantised here."""
    own = [number for number, part in enumerate(image.parts) if part.spec.is_delta and number not in image.away]
    stride = sample_stride(sum(image.parts[number].size for number in own))
    found = []
    for number in own:
        for index, slot in enumerate(image.parts[number].slots):
            line = image.arrays[number][slot.start : slot.start + slot.leaf.count : stride]
            found.append(_Sample(number, index, stride, line.astype(np.float64)))
    return found
