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
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from stepwell.errors import ConfigError, RoomError, StateError
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs.assignment import CodedPart, CodedSlot
from stepwell.storage.codecs.codec_spec import LC, Spec, Ternary, Uniform
from stepwell.storage.codecs.coding_groups import AGAIN, EXACT, FRESH, Coded, KeptGroups
from stepwell.storage.codecs.device import kernels
from stepwell.storage.codecs.device.first_pass import Choices, Rules
from stepwell.storage.codecs.device.kernel_tables import UNCODABLE, Results, Sample, TablePlaces
from stepwell.storage.codecs.parts import is_thinned
from stepwell.storage.codecs.signature import COLUMNS, FACTOR, part_digest
from stepwell.storage.codecs.sparse import Sparse
from stepwell.storage.codecs.tables import stored_bits

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

    def catch_up(self) -> None:
        """Blocks the host until all that is queued here is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self) -> None:
        """Blocks the host until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()


class DeviceCoder:
    """One part of float32 tensors on one device; `start` makes one. Constructing makes room on the device."""

    def __init__(self, part: CodedPart, device: torch.device, skip: Spec | None) -> None:
        self.part, self._device, self._side = part, device, _Side(device)
        self._skip = part if skip is None else part.for_skip(skip)
        self.reference = torch.empty(part.size, dtype=torch.float32, device=device)
        self._places = {
            bits: TablePlaces(part, bits, device) for bits in map(stored_bits, (part.spec, self._skip.spec))
        }
        self._sample = Sample(part, device)
        self._results = Results(len(part.groups()), self._sample.count, device)
        self._rules = Rules(part, device)
        self._known: dict[int, KeptGroups] = {}
        self._is_fresh = np.ones(len(part.groups()), np.bool_)
        self._counts = [slot.leaf.count for slot in part.slots]
        self._used, self._is_skip, self._is_thinned = self._places[stored_bits(part.spec)], False, False
        self._choices: Choices | None = None
        self._sources: list[torch.Tensor] = []

    @classmethod
    def start(cls, part: CodedPart, tensors: Sequence[torch.Tensor], *, skip: Spec) -> DeviceCoder:
        """Take the tensors' values as those of the base. `skip`: codec of records against it. Raises RoomError."""
        coder = cls.make(part, tensors[0].device, skip=skip)
        coder.begin(tensors)
        return coder

    @classmethod
    def make(cls, part: CodedPart, device: torch.device, *, skip: Spec | None = None) -> DeviceCoder:
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
        """Readers have these values, those of the base, and no tables: a skip record begins with it. A record that was
        not finished is forgotten.
        """
        self._known, self._is_fresh[:] = {}, True
        self._choices, self._sources = None, []
        lines = self.reference.split(self._counts)
        with self._side.passes():
            for line, value in zip(lines, values, strict=True):
                line.copy_(value.detach().reshape(-1), non_blocking=True)
        self._side.guard()  # the values may go, if they are on the device

    def encode(self, tensors: Sequence[torch.Tensor], *, reuse: bool = True, is_skip: bool = False) -> None:
        """Queue the passes over the tensors. The host waits where tables have to be made, which takes the first pass.
        Raises StateError if these are not the part's tensors; after any other error a new base is due. `finish` comes
        next.
        """
        assert self._choices is None, "the record before is not finished"
        self._check(tensors)
        part = self._skip if is_skip else self.part
        places = self._places[stored_bits(part.spec)]
        self._used, self._is_skip, self._is_thinned = places, is_skip, is_thinned(part.spec)
        self._sources = list(tensors)  # held until the passes are over
        is_fresh = self._is_fresh if reuse and not is_skip else np.ones_like(self._is_fresh)
        with self._side.passes():
            places.point_at(self._sources)
            self._results.clear()
            self._choices = self._choose(part, places, is_fresh)
            self._run(part, places)
        with self._side.copies():
            self._results.download()

    def guard(self) -> None:
        """What the current stream does from here on comes after the passes: the tensors may be changed then."""
        self._side.guard()

    def finish(self, room: torch.Tensor | None = None) -> Given:
        """The record's part. Blocks until the symbols are on the host, in `room` if that is given; otherwise they stay
        there until the next `finish`.
        """
        assert self._choices is not None, "nothing was encoded"
        self._side.wait()
        places, coded, tables = self._used, Coded(), self._choices.tables
        outcomes, spans = self._results.outcomes(), list[slice]()
        known: dict[int, KeptGroups] = {}
        made = iter(range(len(outcomes)))
        for number, (kind, outcome) in enumerate(zip(self._choices.kinds.tolist(), outcomes, strict=True)):
            slots, span = places.tiles.groups[number]
            kept = self._known[number] if kind == AGAIN else None
            if kind == FRESH and tables is not None:
                kept = KeptGroups(tables.table(next(made)), 0)
            if kept is not None and not outcome.is_sound:
                kind = EXACT
            elif kept is not None:
                known[number] = kept.used(outcome, is_new=kind == FRESH)
                coded.facts.kept += outcome.kept
            spans += [span] if kind in (FRESH, AGAIN) else []
            coded.add(kind, kept.table if kept else None, self._exact(slots) if kind == EXACT else [])
            coded.facts.entries += sum(slot.leaf.count for slot in slots)
        self._known, self._choices, self._sources = {} if self._is_skip else known, None, []
        self._is_fresh[:] = [n not in self._known or not self._known[n].is_good for n in range(len(outcomes))]
        with self._side.copies():
            symbols = places.download(spans, room, is_thinned=self._is_thinned)
        self._side.wait()
        coded.packed, coded.sparse = ([], symbols) if isinstance(symbols, Sparse) else (symbols, None)
        missing, way = self._results.missing_and_way()
        return Given(coded, part_digest(4 * self.part.size, self._results.signature()), missing, way)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        # By `map`: with hundreds of tensors the device waits for this.
        if (
            list(map(torch.Tensor.numel, tensors)) == self._counts
            and all(map(torch.Tensor.is_contiguous, tensors))
            and {torch.float32}.issuperset(map(attrgetter("dtype"), tensors))
            and {self._device}.issuperset(map(attrgetter("device"), tensors))
        ):
            return
        for slot, tensor in zip(self.part.slots, tensors, strict=True):
            fits = tensor.dtype == torch.float32 and tensor.numel() == slot.leaf.count and tensor.is_contiguous()
            if not fits or tensor.device != self._device:
                raise StateError(
                    f"leaf {slot.leaf.name!r} is no contiguous float32 tensor of {slot.leaf.count} entries on "
                    f"{self._device}; begin a new base",
                    leaf=slot.leaf.name,
                )

    def _choose(self, part: CodedPart, places: TablePlaces, is_fresh: NDArray[np.bool_]) -> Choices:
        """As `parts._code_group`, for all groups at once: the first pass, if a group wants a new table."""
        if not is_fresh.any():
            return Choices(np.full(is_fresh.size, AGAIN, np.int32))

        def count(kernel: Any, wanted: torch.Tensor, **options: Any) -> None:
            self._launch(kernel, places, wanted, self.reference, **options, **kernels.BUILD)

        return self._rules.make(part.spec, is_fresh, count, self._side.catch_up)

    def _run(self, part: CodedPart, places: TablePlaces) -> None:
        """The second pass; what it left wrong is put right at once, while the tensors are as they were."""
        rules, results = self._rules, self._results
        found = (results.stats, results.trouble, places.powers, results.sums, places.tiles.rows)
        self._launch(
            kernels.encode, places, rules.rows, rules.words, self.reference, places.packed, *found, MOST=UNCODABLE,
            KIND=_KINDS[type(part.spec)], BITS=places.bits, FACTOR=FACTOR, **kernels.ENCODE_BUILD,
        )  # fmt: skip
        self._launch(
            kernels.settle, places, rules.rows, self.reference, *found, places.count, MOST=UNCODABLE, FACTOR=FACTOR,
            programs=kernels.SPARSE, **kernels.BUILD,
        )  # fmt: skip
        self._sample.measure(places.leaves, self.reference, results.error)

    def _launch(
        self, kernel: Any, places: TablePlaces, *arguments: Any, programs: int | None = None, **options: Any
    ) -> None:
        """Over all tiles: a program each, unless it is said how many."""
        if places.count:
            kernel[(min(places.count, programs or places.count),)](
                places.table, places.leaves, *arguments, COLUMNS=COLUMNS, WIDTH=kernels.WIDTH, ALIGN=places.align,
                **options,
            )  # fmt: skip

    def _exact(self, slots: Sequence[CodedSlot]) -> list[bytes]:
        """The values of a group that could not be coded, which the reference holds."""
        with self._side.copies():
            lines = [self.reference[slot.start : slot.start + slot.leaf.count].cpu() for slot in slots]
        return [line.numpy().tobytes() for line in lines]
