"""Which leaf gets which codec, by its role, and where it lies in the reader's state.

Owns:    the rules by role and element type, the parts (all leaves of one codec) and their groups (what shares a
         quantiser table).
Before:  the caller's leaves, each stored once (tied tensors are one leaf).   After: `image` holds the parts.
Holds:   second moments never get a code that can round to zero; what is not known is stored as it is; only float32 is
         ever quantised. Writer and reader make the same layout from a chain's document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from stepwell.errors import ConfigError, StateError
from stepwell.storage.codecs.codec_spec import LC, Hold, Raw, Spec, Ternary, Top, Uniform, XorCodec
from stepwell.storage.codecs.floats import AnyArray, Bytes
from stepwell.storage.format import dtypes

State = Mapping[str, AnyArray]
"""Values by name of the leaf. What NumPy has no type for (bfloat16) may come as any type of the same size."""
_INEXACT: Final = frozenset({"float16", "bfloat16", "float64"})


@dataclass(frozen=True)
class CodedLeaf:
    """One tensor: torch's name of its element type, and its role as in a shard's record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str

    @property
    def count(self) -> int:
        return dtypes.element_count(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """The settings of a chain of lossy checkpoints.

    parameters, first_moments, second_moments: codecs by role. All other state is stored exactly.
    every:         steps from one record to the next
    worth:         a restart prefers a lossy, newer state if it saves more seconds of work than this
    small:         how to store parameters with fewer than `small_below` entries: `exact`, or `pool`, with one table for
                   all of them (for networks that have only small ones)
    skip, skip_every: every n-th record refers to the base, with this codec for the parameters; 0: none does
    most_records, most_error, least_kept: limits after which a new base is due (`refresh`)
    keep_segments: how many stretches of records before a skip record to keep
    reuse_tables:  reuse quantiser tables and code tables while they fit
    dictionary_bytes: size of a zstd dictionary for records of a few kilobytes; 0: none
    device:        quantise parameters on the GPU and copy only symbols: no full state remains in memory after a crash
                   of this process, and no record refers to the base
    """

    parameters: Spec = field(default_factory=LC)
    first_moments: Spec = field(default_factory=lambda: Top(0))
    second_moments: Spec = field(default_factory=lambda: Top(3))
    every: int = 1
    worth: float = 60.0
    small: Literal["exact", "pool"] = "exact"
    small_below: int = 4096
    skip: Spec = field(default_factory=lambda: Uniform(0.25))
    skip_every: int = 8
    most_records: int = 512
    most_error: float = 0.3
    least_kept: float = 0.0
    keep_segments: int = 2
    reuse_tables: bool = True
    dictionary_bytes: int = 0
    device: bool = False

    @classmethod
    def of(cls, wanted: Spec | Deltas) -> Deltas:
        """A single codec means the defaults, with this codec for the parameters."""
        return wanted if isinstance(wanted, Deltas) else cls(parameters=wanted)

    def __post_init__(self) -> None:
        if isinstance(self.parameters, Hold):
            raise ConfigError("parameters=hold: nothing of the run would be stored; it is for moments", found="hold")
        if self.second_moments.is_delta:
            raise ConfigError(
                f"second_moments={self.second_moments.text}: it rounds small values to zero, and a second moment of "
                "zero blows training up; use top, xor, zstd, raw or hold",
                found=self.second_moments.text,
            )
        if not self.skip.is_delta:
            raise ConfigError(
                f"skip={self.skip.text}: lc, ternary or uniform; an exact one is a new base", found=self.skip.text
            )
        if self.small not in ("exact", "pool"):
            raise ConfigError(f"small={self.small!r}: give exact or pool", found=self.small)
        if not (self.worth >= 0 and self.most_error > 0 and self.dictionary_bytes >= 0):
            raise ConfigError("worth and dictionary_bytes are at least 0, most_error is above 0")
        if self.every < 1 or self.keep_segments < 1 or self.most_records < 1 or self.skip_every < 0:
            raise ConfigError("every, keep_segments and most_records are at least 1, skip_every at least 0")


@dataclass(frozen=True)
class CodedSlot:
    """A leaf's place in its part: from entry `start` on, in the part's groups number `group`."""

    leaf: CodedLeaf
    start: int
    group: int


@dataclass(frozen=True)
class CodedPart:
    """All leaves of one codec. A part of floats counts in entries, a part of bytes in bytes."""

    spec: Spec
    slots: tuple[CodedSlot, ...]

    @property
    def is_floats(self) -> bool:
        return self.spec.is_floats

    @property
    def is_held(self) -> bool:
        """Whether records have nothing of it."""
        return isinstance(self.spec, Hold)

    @property
    def size(self) -> int:
        if not self.slots:
            return 0
        last = self.slots[-1]
        return last.start + (last.leaf.count if self.is_floats else last.leaf.nbytes)

    def groups(self) -> list[list[CodedSlot]]:
        """Slots that share a table, in their order."""
        found: dict[int, list[CodedSlot]] = {}
        for slot in self.slots:
            found.setdefault(slot.group, []).append(slot)
        return list(found.values())

    def for_skip(self, skip: Spec) -> CodedPart:
        """The same part as a skip record codes it. Its leaves keep their places."""
        return replace(self, spec=skip) if self.spec.is_delta else self


def choose(leaf: CodedLeaf, deltas: Deltas) -> Spec:
    """The codec of one leaf."""
    if leaf.role == "parameter":
        if leaf.dtype == "float32":
            is_small = leaf.count < deltas.small_below and deltas.small == "exact"
            return Raw() if is_small and deltas.parameters.is_delta else deltas.parameters
        # Wider or narrower floats: a state in bfloat16 would swallow small steps. What XOR leaves is exact.
        return XorCodec() if leaf.dtype in _INEXACT else Raw()
    spec = {"moment1": deltas.first_moments, "moment2": deltas.second_moments}.get(leaf.role, Raw())
    if leaf.dtype == "float32" or (isinstance(spec, Hold) and leaf.dtype in _INEXACT):
        return spec
    return Raw() if spec == Raw() or leaf.dtype not in _INEXACT else XorCodec()


def arrange(leaves: Sequence[CodedLeaf], deltas: Deltas) -> tuple[CodedPart, ...]:
    """Parts in the order their codecs first occur. Raises ConfigError or StateError."""
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise ConfigError("two leaves share a name; a tied tensor is one leaf")
    if unknown := [leaf for leaf in leaves if not dtypes.is_known(leaf.dtype)]:
        raise StateError(f"leaf {unknown[0].name!r} has unknown element type {unknown[0].dtype!r}")
    by_spec: dict[Spec, list[CodedLeaf]] = {}
    for leaf in leaves:
        by_spec.setdefault(choose(leaf, deltas), []).append(leaf)
    return tuple(_part(spec, members, deltas) for spec, members in by_spec.items())


def _part(spec: Spec, leaves: list[CodedLeaf], deltas: Deltas) -> CodedPart:
    is_global = isinstance(spec, (LC, Ternary, Uniform)) and spec.scope == "global"
    groups = []
    for number, leaf in enumerate(leaves, 1):
        is_pooled = spec.is_delta and (is_global or leaf.count < deltas.small_below)  # small ones are here if pooled
        groups.append(0 if is_pooled else number)
    return place(spec, leaves, groups)


def place(spec: Spec, leaves: Sequence[CodedLeaf], groups: Sequence[int]) -> CodedPart:
    """A part of these leaves, one after the other."""
    slots, start = [], 0
    for leaf, group in zip(leaves, groups, strict=True):
        slots.append(CodedSlot(leaf, start, group))
        start += leaf.count if spec.is_floats else leaf.nbytes
    return CodedPart(spec, tuple(slots))


def flat(leaf: CodedLeaf, value: AnyArray, *, is_floats: bool) -> AnyArray:
    """A leaf's values in C order, in one dimension: as float32, or as bytes. Raises StateError if they do not fit."""
    if value.nbytes != leaf.nbytes or (is_floats and value.dtype != np.float32):
        raise StateError(
            f"leaf {leaf.name!r} is {leaf.dtype} with {leaf.nbytes} bytes, found {value.dtype} with {value.nbytes}; "
            "begin a new base",
            leaf=leaf.name,
            expected=leaf.nbytes,
            found=value.nbytes,
        )
    line = np.ascontiguousarray(value).reshape(-1)
    return line if is_floats else as_bytes(line)


def as_bytes(line: AnyArray) -> Bytes:
    """The bytes of a one-dimensional array that has no gaps."""
    return line.view(np.uint8) if line.size else np.empty(0, np.uint8)
