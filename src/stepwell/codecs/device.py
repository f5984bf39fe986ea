"""Quantising on the device, before the copy to the host: records of the same bytes as those coded on the host.

Owns:    the readers' state of one part on the device, its tables, and the order of the passes.
Before:  the training stream has a state at rest.   After: `chain` is given the symbols, and seals and stores them.
Holds:   what `finish` gives leads a reader to the bits of the reference here. Passes run on a side stream; the training
         stream waits for them (`guard`), never for the copy of the symbols. Launches do not grow with the leaves.

    coder = DeviceCoder.start(part, tensors, skip=deltas.skip)     # the base is made of the same values
    coder.encode(tensors)                                          # the host waits only where tables are made
    coder.guard()                                                  # before the optimizer changes the tensors
    chain.append(step, others, given={number: coder.finish()})
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from stepwell.codecs import kernels
from stepwell.codecs.coder import Given
from stepwell.codecs.device_tables import UNCODABLE, Choice, Places, Results, Sample, Uploaded, up
from stepwell.codecs.floats import KEYS
from stepwell.codecs.groups import AGAIN, EXACT, FRESH, SAME, Coded, Kept
from stepwell.codecs.histogram import Histogram
from stepwell.codecs.layout import Part, Slot
from stepwell.codecs.signature import COLUMNS, FACTOR, part_digest
from stepwell.codecs.spec import LC, Spec, Ternary, Uniform
from stepwell.codecs.tables import make_table, stored_bits, wanted_ranges
from stepwell.errors import ConfigError, RoomError, StateError

_NO_MAGNITUDE: Final = 0x7FFFFFFF
_KINDS: Final = {LC: kernels.LC, Ternary: kernels.TERNARY, Uniform: kernels.UNIFORM}


class _Side:
    """A stream beside the current one. On the host, where kernels are interpreted, there is none, and no waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device, is_cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._passed = torch.cuda.Event() if is_cuda else None
        self._copied = torch.cuda.Event() if is_cuda else None

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """What is queued here comes after all that the current stream has queued, and `guard` waits for it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        if self._passed is not None:
            self._passed.record(self._stream)

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        """What is queued here comes after the passes; `wait` waits for it, the current stream never does."""
        with torch.cuda.stream(self._stream):
            yield
        if self._copied is not None:
            self._copied.record(self._stream)

    def guard(self) -> None:
        if self._passed is not None:
            torch.cuda.current_stream(self._device).wait_event(self._passed)

    def wait(self) -> None:
        """Blocks the host."""
        if self._copied is not None:
            self._copied.synchronize()


class DeviceCoder:
    """One part of float32 tensors on one device; `start` makes one. Constructing makes room on the device."""

    def __init__(self, part: Part, device: torch.device, skip: Spec | None) -> None:
        self.part, self._device, self._side = part, device, _Side(device)
        self._skip = part if skip is None else part.for_skip(skip)
        self.reference = torch.empty(part.size, dtype=torch.float32, device=device)
        self._places = {bits: Places(part, bits, device) for bits in map(stored_bits, (part.spec, self._skip.spec))}
        self._results = Results(len(part.groups()), device)
        self._sample = Sample(part, device)
        self._known: dict[int, Kept] = {}
        self._uploaded: Uploaded | None = None
        self._used, self._is_skip = self._places[stored_bits(part.spec)], False
        self._choices: list[Choice] | None = None
        self._sources: list[torch.Tensor] = []

    @classmethod
    def start(cls, part: Part, tensors: Sequence[torch.Tensor], *, skip: Spec) -> DeviceCoder:
        """Take the tensors' values as those of the base. `skip`: codec of records against it. Raises RoomError."""
        coder = cls.make(part, tensors[0].device, skip=skip)
        coder.begin(tensors)
        return coder

    @classmethod
    def make(cls, part: Part, device: torch.device, *, skip: Spec | None = None) -> DeviceCoder:
        """`begin` comes next. Raises RoomError where the device has no memory for a copy of the part: code on the host
        then.
        """
        if not part.spec.is_delta:
            raise ConfigError(f"{part.spec.text} is coded on the host", found=part.spec.text)
        try:
            return cls(part, device, skip)
        except torch.OutOfMemoryError as error:
            nbytes = 4 * part.size
            raise RoomError(
                f"the device has no memory for a copy of {nbytes} bytes; code on the host", found=nbytes
            ) from error

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """These are the values of a base, here or on the host, where they stay until the next `finish`."""
        self.reset(values)
        with self._side.passes():
            self._sample.take_base(self.reference)

    @property
    def packed_nbytes(self) -> int:
        """Of a record's symbols."""
        return self._places[stored_bits(self.part.spec)].packed.numel()

    def reset(self, values: Sequence[torch.Tensor]) -> None:
        """Readers have these values, those of the base, and no tables: a skip record begins with it."""
        self._known, self._uploaded = {}, None
        lines = self.reference.split([slot.leaf.count for slot in self.part.slots])
        with self._side.passes():
            for line, value in zip(lines, values, strict=True):
                line.copy_(value.detach().reshape(-1), non_blocking=True)
        self._side.guard()  # the values may go, if they are on the device

    def encode(self, tensors: Sequence[torch.Tensor], *, reuse: bool = True, is_skip: bool = False,
               room: torch.Tensor | None = None) -> None:  # fmt: skip
        """Queue the passes over the tensors and the copy of the symbols, into `room` on the host if that is given. The
        host waits where tables have to be made, which takes the first pass. Raises StateError if these are not the
        part's tensors; after any other error a new base is due. `finish` comes next.
        """
        assert self._choices is None, "the record before is not finished"
        self._check(tensors)
        part = self._skip if is_skip else self.part
        places = self._places[stored_bits(part.spec)]
        self._used, self._is_skip = places, is_skip
        self._sources = [tensor.detach() for tensor in tensors]  # held until the passes are over
        with self._side.passes():
            places.point_at(self._sources)
            self._choices = self._choose(part, places, reuse and not is_skip)
            if self._uploaded is None or any(choice.kind != AGAIN for choice in self._choices):
                self._uploaded = Uploaded(self._choices, places.bits, self._device)
            self._run(part, places, self._uploaded)
        with self._side.copies():
            places.download(room)
            self._results.download()

    def guard(self) -> None:
        """What the current stream does from here on comes after the passes: the tensors may be changed then."""
        self._side.guard()

    def finish(self) -> Given:
        """The record's part. Blocks until the symbols are on the host; they stay there until the next `encode`."""
        assert self._choices is not None, "nothing was encoded"
        self._side.wait()
        places, coded = self._used, Coded()
        packed, outcomes = places.packed_bytes(), self._results.outcomes()
        known: dict[int, Kept] = {}
        for number, (choice, outcome) in enumerate(zip(self._choices, outcomes, strict=True)):
            slots, span = places.tiles.groups[number]
            kind, kept = choice.kind, choice.kept
            if kept is not None and not outcome.is_sound:
                kind = EXACT
            elif kept is not None:
                known[number] = kept.used(outcome, is_new=kind == FRESH)
                coded.facts.kept += outcome.kept
            coded.add(kind, kept.table if kept else None, packed[span], self._exact(slots) if kind == EXACT else [])
            coded.facts.entries += sum(slot.leaf.count for slot in slots)
        self._known, self._choices, self._sources = {} if self._is_skip else known, None, []
        missing, way = self._results.missing_and_way()
        return Given(coded, part_digest(4 * self.part.size, self._results.signature()), missing, way)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        for slot, tensor in zip(self.part.slots, tensors, strict=True):
            fits = tensor.dtype == torch.float32 and tensor.numel() == slot.leaf.count and tensor.is_contiguous()
            if not fits or tensor.device != self._device:
                raise StateError(
                    f"leaf {slot.leaf.name!r} is no contiguous float32 tensor of {slot.leaf.count} entries on "
                    f"{self._device}; begin a new base",
                    leaf=slot.leaf.name,
                )

    def _choose(self, part: Part, places: Places, reuse: bool) -> list[Choice]:
        """As `parts._code_group`, for all groups at once."""
        groups = range(len(places.tiles.groups))
        again = {number for number in groups if reuse and number in self._known and self._known[number].is_good}
        fresh = self._measure(part, places, [number for number in groups if number not in again])
        return [Choice(AGAIN, self._known[number]) if number in again else fresh[number] for number in groups]

    def _measure(self, part: Part, places: Places, numbers: Collection[int]) -> dict[int, Choice]:
        """The first pass, with tables made of what it finds."""
        if not numbers:
            return {}
        counts = torch.zeros((len(places.tiles.groups), KEYS), dtype=torch.int64, device=self._device)
        self._launch(kernels.count_keys, places, self._wanted(numbers), self.reference, counts)
        found = {number: Histogram(line) for number, line in enumerate(counts.cpu().numpy()) if number in numbers}
        for number, histogram in found.items():
            entries = sum(slot.leaf.count for slot in places.tiles.groups[number][0])
            histogram.counts[0] = entries - histogram.counts[1:].sum()  # without the lanes beyond a leaf's end
        coded = {number: each for number, each in found.items() if each.is_codable and not each.is_empty}
        if coded and wanted_ranges(part.spec):
            self._find_ranges(places, coded, wanted_ranges(part.spec))
        choices = {number: Choice(SAME if each.is_codable else EXACT) for number, each in found.items()}
        return choices | {n: Choice(FRESH, Kept(make_table(part.spec, each), 0)) for n, each in coded.items()}

    def _find_ranges(self, places: Places, found: dict[int, Histogram], most: int) -> None:
        shape = (len(places.tiles.groups), kernels.MOST_SYMBOLS)
        keys = np.full(shape, -1, np.int32)
        for number, histogram in found.items():
            top = histogram.top(most)
            keys[number, : len(top)] = top
        low, high = (torch.full(shape, bits, dtype=torch.int32, device=self._device) for bits in (_NO_MAGNITUDE, 0))
        wanted = self._wanted(found)
        self._launch(kernels.find_ranges, places, wanted, self.reference, up(keys, self._device), low, high)
        least, largest = low.cpu().numpy(), high.cpu().numpy()
        for number, histogram in found.items():
            for place, key in enumerate(keys[number].tolist()):
                if key >= 0:
                    histogram.lo[key], histogram.hi[key] = int(least[number, place]), int(largest[number, place])

    def _wanted(self, numbers: Collection[int]) -> torch.Tensor:
        flags = np.zeros(len(self.part.groups()), np.int32)
        flags[list(numbers)] = 1
        return up(flags, self._device)

    def _run(self, part: Part, places: Places, tables: Uploaded) -> None:
        """The second pass; what it left wrong is put right at once, while the tensors are as they were."""
        results, sums = self._results, (places.powers, self._results.sums, places.tiles.rows)
        results.clear()
        self._launch(
            kernels.encode, places, tables.modes, self.reference, places.packed, tables.values, tables.keys,
            tables.scales, results.stats, *sums, KIND=_KINDS[type(part.spec)], BITS=places.bits, FACTOR=FACTOR,
        )  # fmt: skip
        self._launch(
            kernels.settle, places, tables.modes, self.reference, results.stats, *sums, MOST=UNCODABLE, FACTOR=FACTOR
        )
        self._sample.measure(places.leaves, self.reference, results.error)

    def _launch(self, kernel: Any, places: Places, *arguments: Any, **options: int) -> None:
        if places.grid[0]:
            kernel[places.grid](
                places.table, places.leaves, *arguments, COLUMNS=COLUMNS, WIDTH=kernels.WIDTH, ALIGN=places.align,
                **options, **kernels.BUILD,
            )  # fmt: skip

    def _exact(self, slots: Sequence[Slot]) -> list[bytes]:
        """The values of a group that could not be coded, which the reference holds."""
        with self._side.copies():
            lines = [self.reference[slot.start : slot.start + slot.leaf.count].cpu() for slot in slots]
        return [line.numpy().tobytes() for line in lines]
