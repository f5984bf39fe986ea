"""Parameters that are coded where they are: of a step, symbols and the leaves beside them go into a slot.

Owns:    which part of the state that is, the coder, and the base that its records are against.
Before:  the agent has begun a chain, and the slot of its base is kept (`on_rebased`).   After: the agent appends the
         record (`codecs.given`).
Holds:   each record goes on from the one before, so none is left out: a slot is claimed before anything is coded, and
         after a record that came to nothing there are none until the next base. That one is asked for until it is
         there; after one that had no record, not before ASK_SECONDS are over. Training never waits for copies or the
         disk, and before the optimizer only for the passes over the parameters, which wait for tables that are new.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch

from stepwell.errors import RoomError
from stepwell.events import chain_events, journal
from stepwell.handover.memory import Arena, whole_pages
from stepwell.handover.protocol import BaseTaken
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs import precoded
from stepwell.storage.codecs.assignment import CodedLeaf, CodedPart, Deltas, arrange
from stepwell.training.loop.waits import until
from stepwell.training.snapshot.arrange import Arrangement, Arranger
from stepwell.training.snapshot.guard import Live
from stepwell.training.snapshot.layout import Plan
from stepwell.training.state.fingerprint import content_digest
from stepwell.training.state.flatten import Flat
from stepwell.types import CodedPlace

SPARE_BYTES: Final = 1 << 20
"""What a slot has to have beyond the state: tables and facts of a record, each on pages of their own."""
ASK_SECONDS: Final = 30.0
"""From a base that came to no record until another one is asked for: each costs a whole checkpoint."""
_MOST_OFFERED: Final = 8


class DeviceCoding(Protocol):
    """What `codecs.device` makes."""

    @property
    def packed_nbytes(self) -> int: ...

    def begin(self, values: Sequence[torch.Tensor]) -> None: ...

    def encode(self, tensors: Sequence[torch.Tensor], *, reuse: bool = ...) -> None: ...

    def guard(self) -> None: ...

    def finish(self, room: torch.Tensor) -> Given: ...


def can_code(device: torch.device) -> bool:
    """Whether there are kernels for it; by Triton's interpreter they run on the host too."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def make_coder(part: CodedPart, device: torch.device) -> DeviceCoding:
    """Raises RoomError, or ImportError where there is no Triton."""
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

    return DeviceCoder.make(part, device)


@dataclass(frozen=True)
class _Base:
    """A snapshot that may be, or is, the base of a chain: where it lies, and its name, once that is known."""

    sequence: int
    plan: Plan
    arena: Arena
    slot: int
    name: str = ""


@dataclass(frozen=True)
class _Coded:
    """What is coded on a device: the part with this number of the states of one plan."""

    plan: Plan
    part: CodedPart
    number: int
    device: torch.device
    coder: DeviceCoding
    reuse: bool
    beside: frozenset[str]
    """Names of the leaves that go into a slot as they are."""


@dataclass(frozen=True)
class CodedRecord:
    """One step, on its way. arrangement: of the leaves beside. names, live, tensors: of those that are coded."""

    arrangement: Arrangement
    names: list[str]
    live: list[Live]
    tensors: list[torch.Tensor]
    base: _Base
    coded: _Coded

    def place(self) -> CodedPlace:
        """Where the agent finds what."""
        start, nbytes = whole_pages(self.arrangement.plan.live.nbytes), self.coded.coder.packed_nbytes
        return CodedPlace(self.base.name, self.coded.number, start, nbytes, start + whole_pages(nbytes))

    def digests(self) -> dict[str, tuple[torch.Tensor, str]]:
        """What is coded, as it is now."""
        pairs = zip(self.names, self.tensors, strict=True)
        return {name: (tensor, content_digest(tensor)) for name, tensor in pairs}


class CodedSymbols:
    """For one run. `arranger`: one of its own, for the leaves beside."""

    def __init__(self, deltas: Deltas, arranger: Arranger, log: journal.EventLog,
                 say: Callable[[BaseTaken], None]) -> None:  # fmt: skip
        self._deltas, self._arranger, self._log, self._say = deltas, arranger, log, say
        self._coded: _Coded | None = None
        self._looked = -1
        self._offered: dict[int, _Base] = {}
        self._base: _Base | None = None
        self._is_fresh = False
        self._asked_at = -ASK_SECONDS
        self._lock = threading.Lock()
        self._ask_for_base: Callable[[], bool] = lambda: False

    def open(self, ask_for_base: Callable[[], bool]) -> None:
        """The run is ours. `ask_for_base`: only a new base helps; returns whether it is asked for."""
        self._ask_for_base = ask_for_base

    # -- bases --------------------------------------------------------------------------------------------------------

    def offer(self, arrangement: Arrangement, sequence: int, arena: Arena, slot: int) -> tuple[int, ...]:
        """A snapshot of the whole state that may become a base. Returns the parts that records will have coded."""
        if self._looked != arrangement.plan.number:
            self._look(arrangement, arena)
        if self._coded is None:
            return ()
        with self._lock:
            self._asked_at = time.monotonic()
            self._offered[sequence] = _Base(sequence, arrangement.plan, arena, slot)
            for old in sorted(self._offered)[:-_MOST_OFFERED]:
                del self._offered[old]
        return (self._coded.number,)

    def prepare(self, arrangement: Arrangement, arena: Arena, image: torch.Tensor) -> None:
        """Make room, and use every kernel once: its first use takes seconds, and where it fails, the host has to code.
        In the background of training.
        """
        self._look(arrangement, arena)
        if self._coded is None:
            return
        coder, device = self._coded.coder, self._coded.device
        late = _at_rest(arrangement)
        tensors = [late[slot.leaf.name] for slot in self._coded.part.slots]
        room = image[: coder.packed_nbytes]
        try:
            with _stream(device):  # what comes of it is nobody's
                coder.begin(tensors)
                for _ in range(2):  # with new tables, and with known ones
                    coder.encode(tensors)
                    coder.finish(room)
        except Exception as error:  # of a compiler too: no checkpoint may depend on it
            self._coded = None
            self._log.emit(chain_events.Coding(where="host", reason=f"{type(error).__name__}: {error}"))

    def _look(self, arrangement: Arrangement, arena: Arena) -> None:
        self._looked, self._coded = arrangement.plan.number, None
        self._coded = self._find(arrangement, arena)

    def _find(self, arrangement: Arrangement, arena: Arena) -> _Coded | None:
        """What can be coded on a device, with room there for it; None, and an event, if it is left to the host."""
        plan, deltas = arrangement.plan, self._deltas
        leaves = [
            CodedLeaf(entry.name, entry.dtype, entry.shape, entry.role) for entry in plan.entries if not entry.file
        ]
        parts = arrange(leaves, deltas)
        number = next((n for n, part in enumerate(parts) if part.spec == deltas.parameters and part.spec.is_delta), -1)
        names = [slot.leaf.name for slot in parts[number].slots] if number >= 0 else []
        late = _at_rest(arrangement)
        devices = {late[name].device for name in names if name in late}
        reason = "there is nothing to quantise"
        if names and not all(name in late for name in names):
            reason = f"{next(n for n in names if n not in late)} may change at any time, is small, or has gaps"
        elif names and arena.shape.slots < 2:
            reason = "there is only one slot, and a base would occupy it until a record exists"
        elif names and (len(devices) > 1 or not can_code(next(iter(devices)))):
            reason = f"the parameters are on {', '.join(sorted(map(str, devices)))}"
        elif names:
            held = {slot.leaf.name for part in parts if part.is_held for slot in part.slots}
            beside = frozenset(leaf.name for leaf in leaves) - held - set(names)
            device = devices.pop()
            try:
                coder = make_coder(parts[number], device)
                coded = _Coded(plan, parts[number], number, device, coder, deltas.reuse_tables, beside)
                self._log.emit(chain_events.Coding(where=str(device), reason="asked for"))
                return coded
            except (RoomError, ImportError, RuntimeError) as error:
                reason = str(error)
        self._log.emit(chain_events.Coding(where="host", reason=reason))
        return None

    def on_rebased(self, sequence: int, name: str) -> None:
        """The agent has begun a chain of this base, and keeps its slot until it is told that it was read."""
        with self._lock:
            base = self._offered.get(sequence)
            self._offered = {number: base for number, base in self._offered.items() if number > sequence}
            self._drop_base()
            if base is not None:
                self._base, self._is_fresh = replace(base, name=name), True
        if base is None:  # it went with its arena
            self._say_taken(sequence)

    def on_appended(self) -> None:
        """A record is in a chain: bases help, and the next one may be asked for at once."""
        self._asked_at = -ASK_SECONDS

    def on_over(self, name: str | None = None) -> None:
        """There is no chain of this base any more; None: of any."""
        with self._lock:
            if name is None or (self._base is not None and self._base.name == name):
                self._drop_base()

    def _drop_base(self) -> None:
        """Under the lock. The slot of one that nobody will read is not needed any more."""
        if self._base is not None and self._is_fresh:
            self._say_taken(self._base.sequence)
        self._base, self._is_fresh = None, False

    def _say_taken(self, sequence: int) -> None:
        self._say(BaseTaken(sequence))

    def stop(self) -> None:
        """A record came to nothing: those that would follow have nothing to go on from."""
        self.on_over()
        self._ask()

    def _ask(self) -> None:
        now = time.monotonic()
        if now > self._asked_at + ASK_SECONDS and self._ask_for_base():
            self._asked_at = now

    # -- records ------------------------------------------------------------------------------------------------------

    def begin(self, flat: Flat, arrangement: Arrangement) -> CodedRecord | str | None:
        """At the trigger: what this step's record is made of, or why there is none. None: the host codes."""
        if self._coded is None:
            return None if self._looked >= 0 else "there is no base yet"
        coded, base = self._coded, self._base
        if base is None:
            self._ask()
            return "there is no base yet"
        if arrangement.plan is not base.plan or coded.plan is not base.plan:
            self.stop()
            return "the leaves have changed, so a new base is due"
        names, late = [slot.leaf.name for slot in coded.part.slots], _at_rest(arrangement)
        if not late.keys() >= set(names):
            self._looked = -1  # the next base looks again: the host may have to code
            self.stop()
            return "a parameter may now change at any time, or has gaps, so a new base is due"
        kept = [leaf for leaf in flat.leaves if leaf.name in coded.beside]
        count = sum(leaf.name in coded.beside for leaf in flat.leaves[: flat.fixed_count])
        beside = self._arranger.arrange(replace(flat, leaves=kept, fixed_count=count))
        programs = (arrangement.fixed, arrangement.rest)
        live = {name: way for each in programs for name, way in zip(each.watched, each.live, strict=True)}
        tensors = [late[name] for name in names]
        return CodedRecord(beside, names, [live[name] for name in names], tensors, base, coded)

    def start(self, record: CodedRecord, image: torch.Tensor) -> SymbolsJob:
        """A slot is there: code into it, from the copier thread on."""
        with self._lock:
            is_fresh = self._is_fresh and self._base is record.base
            self._is_fresh = self._is_fresh and not is_fresh
        base = record.base
        values = [_floats(base.plan.view(base.arena, base.slot, name)) for name in record.names] if is_fresh else None
        return SymbolsJob(record, image, values, lambda: self._say_taken(base.sequence))

    def let_go(self) -> None:
        """The arena goes: forget what was prepared for it, and bases in it."""
        self._arranger.let_go()
        with self._lock:
            self._offered, self._base, self._is_fresh = {}, None, False


@dataclass
class SymbolsJob:
    """The symbols of one snapshot; used like the copies of a device. values: of a new base, to begin with."""

    record: CodedRecord
    image: torch.Tensor
    values: list[torch.Tensor] | None
    taken: Callable[[], None]
    ready: torch.cuda.Event | None = None
    issued: threading.Event = field(default_factory=threading.Event)
    waits: list[torch.cuda.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.record.coded.device
        if device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(device))

    def issue(self) -> None:
        """Line the passes up. Called once, by the copier thread, which waits where tables are made."""
        coded = self.record.coded
        try:
            with _stream(coded.device, after=self.ready):
                if self.values is not None:
                    coded.coder.begin(self.values)
                coded.coder.encode(self.record.tensors, reuse=coded.reuse)
        finally:
            self.issued.set()

    def gate(self) -> None:
        """Let the compute stream wait for the passes, on the device."""
        until(self.issued, "the start of coding on the device")
        if self.ready is None or self.waits:
            return
        stream = torch.cuda.current_stream(self.record.coded.device)
        self.waits = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.waits[0].record(stream)
        self.record.coded.coder.guard()
        self.waits[1].record(stream)

    def stop(self) -> None:
        """The snapshot is lost: nobody waits for it, nor for the base, which the coder will not go on from."""
        self.issued.set()
        if self.values is not None:
            self.taken()
            self.values = None

    def waited_seconds(self) -> float | None:
        """How long the compute stream stood at the gate; None if that is not known (yet)."""
        if not self.waits or not self.waits[1].query():
            return None
        return float(self.waits[0].elapsed_time(self.waits[1])) / 1000

    def finish(self, on_copied: Callable[[int], None]) -> list[str]:
        """Wait for the symbols, and put down what goes with them."""
        about = self.record.place()
        data = precoded.dump(self.record.coded.coder.finish(self.image[about.start :][: about.nbytes]))
        if self.values is not None:
            self.taken()
            self.values = None
        if about.facts + len(data) > self.image.numel():
            raise RoomError(f"a slot has no room for {len(data)} bytes beside the symbols", found=len(data))
        self.image[about.facts : about.facts + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return []


@contextlib.contextmanager
def _stream(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """What is queued waits for what came before `after`, and for nothing else that training does."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        yield


def _at_rest(arrangement: Arrangement) -> dict[str, torch.Tensor]:
    """Leaves that stay as they are until an optimizer's step, and have no gaps."""
    return {source.name: source.tensor for source in arrangement.late() if source.tensor.is_contiguous()}


def _floats(line: torch.Tensor) -> torch.Tensor:
    return line.view(torch.float32)
