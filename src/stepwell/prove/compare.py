"""Two final checkpoints, leaf by leaf and byte for byte, and their plain values one by one.

Owns:    what "the same state" means. Needs no torch: bytes are bytes.
Holds:   every file of both is checked against its checksums first, so a difference is one of the runs, not of the
         disk; memory use does not grow with the state.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepwell.errors import DamagedError, RestoreError
from stepwell.format import dtypes
from stepwell.format.record import LeafEntry, Record
from stepwell.restore.read import FileSource, read_record_leaves
from stepwell.store import catalog, files
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId

_CHUNK: Final = 1 << 20
_PAIRS: Final = ("$dict", "$ordered", "$counter")
_SEQUENCES: Final = ("$tuple", "$set", "$frozenset")
_STRUCT: Final = {
    "float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i", "int16": "<h", "int8": "<b",
    "uint64": "<Q", "uint32": "<I", "uint16": "<H", "uint8": "<B", "bool": "<?", "complex64": "<ff",
    "complex128": "<dd",
}  # fmt: skip


@dataclass(frozen=True)
class LastCheckpoint:
    """The last checkpoint of a run."""

    id: CheckpointId
    record: Record
    directory: Path


@dataclass(frozen=True)
class Difference:
    """One leaf or plain value that is not the same. `text` says how."""

    path: str
    text: str
    is_leaf: bool

    @property
    def generator(self) -> str | None:
        """Name of the global random generator it belongs to, if it does: "python", "numpy", "torch", "cuda"."""
        parts = self.path.split("/")
        return parts[2] if parts[:2] == ["stepwell", "rng"] and len(parts) > 2 else None


@dataclass(frozen=True)
class StateComparison:
    """What was compared and what differs, in the order of the state."""

    step: int
    leaves: int
    nbytes: int
    values: int
    differences: list[Difference]


def last_checkpoint(root: Path) -> LastCheckpoint:
    """The checkpoint a run ended with. Raises RestoreError if it has none, DamagedError if it is damaged."""
    paths = RunPaths(root)
    for entry in catalog.scan(paths):
        if not entry.is_live or not entry.is_committed:
            continue
        if entry.manifest is None:
            raise DamagedError(f"{entry.path}: {entry.damage}", path=str(entry.path))
        return LastCheckpoint(entry.id, catalog.read_record(paths, entry.manifest), entry.path)
    raise RestoreError(f"{root} holds no committed checkpoint", path=str(root))


def compare_states(a: LastCheckpoint, b: LastCheckpoint) -> StateComparison:
    """Compare two checkpoints. Raises DamagedError if one of them is not what its record says."""
    for last in (a, b):
        _check(last)
    values = dict(plain_values(a.record.tree)), dict(plain_values(b.record.tree))
    differences = [*_compare_leaves(a, b), *_compare_values(*values)]
    # Runs of different length differ everywhere: the length is what a person has to know first.
    differences.sort(key=lambda difference: difference.path != "stepwell/step")
    return StateComparison(a.id.step, len(a.record.leaves), a.record.nbytes, len(values[0]), differences)


def _check(last: LastCheckpoint) -> None:
    """Read every byte once against its checksums. What is read is looked at afterwards, in the page cache."""
    read_record_leaves(
        last.record, lambda file: FileSource(last.directory / file.name), None, lambda leaf, offset, data: None
    )


# -- leaves -----------------------------------------------------------------------------------------------------------


def _compare_leaves(a: LastCheckpoint, b: LastCheckpoint) -> Iterator[Difference]:
    others = {leaf.name: leaf for leaf in b.record.leaves}
    with _Bytes(a) as ours, _Bytes(b) as theirs:
        for leaf in a.record.leaves:
            other = others.pop(leaf.name, None)
            if other is None:
                yield Difference(leaf.name, "is missing in the killed run", True)
            elif (leaf.dtype, leaf.shape) != (other.dtype, other.shape):
                yield Difference(leaf.name, f"is {_form(leaf)} uninterrupted, {_form(other)} killed", True)
            else:
                at = first_difference(ours.leaf(leaf), theirs.leaf(other))
                if at is not None:
                    text = describe(leaf, at, ours.leaf(leaf), theirs.leaf(other))
                    yield Difference(leaf.name, text, True)
    for name in others:
        yield Difference(name, "is only in the killed run", True)


class _Bytes:
    """The files of a checkpoint, mapped."""

    def __init__(self, last: LastCheckpoint) -> None:
        self._last = last
        self._maps: list[memoryview] = []

    def __enter__(self) -> _Bytes:
        self._maps = [_map(self._last.directory / file.name, file.nbytes) for file in self._last.record.files]
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # views and maps go together

    def leaf(self, leaf: LeafEntry) -> memoryview:
        return self._maps[leaf.file][leaf.start : leaf.end]


def _map(path: Path, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    with open(files.open_regular(path), "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ))


def first_difference(a: memoryview, b: memoryview) -> int | None:
    """Position of the first byte that differs, or None. Both are equally long."""
    for start in range(0, len(a), _CHUNK):
        left, right = a[start : start + _CHUNK], b[start : start + _CHUNK]
        if left != right:
            return start + next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
    return None


def describe(leaf: LeafEntry, at: int, a: memoryview, b: memoryview) -> str:
    """Where a leaf differs first, and with which values."""
    size = dtypes.itemsize(leaf.dtype)
    number = at // size
    one, two = (element(leaf.dtype, bytes(data[number * size : (number + 1) * size])) for data in (a, b))
    return f"{_form(leaf)}: element {_index(number, leaf.shape)} is {one} uninterrupted, {two} killed"


def _form(leaf: LeafEntry) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _index(number: int, shape: tuple[int, ...]) -> str:
    index = []
    for length in reversed(shape):
        number, rest = divmod(number, length)
        index.append(str(rest))
    return f"[{', '.join(reversed(index))}]"


def element(dtype: str, data: bytes) -> str:
    """One element for a person; element types without a number of their own as hexadecimal bytes."""
    if dtype == "bfloat16":
        dtype, data = "float32", b"\0\0" + data
    if dtype not in _STRUCT:
        return f"0x{data[::-1].hex()}"
    numbers = struct.unpack(_STRUCT[dtype], data)
    if len(numbers) == 2:
        return repr(complex(*numbers))
    # Nine digits tell any two float32 apart.
    return f"{numbers[0]:.9g}" if dtype in ("float32", "float16") else repr(numbers[0])


# -- plain values -----------------------------------------------------------------------------------------------------


def plain_values(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every value of a typed tree under its path, as exact text; containers too, with their kind and length."""
    here = "/".join(path)
    items: list[tuple[str, Any]]
    if isinstance(tree, list):
        kind, items = "list", [(str(i), item) for i, item in enumerate(tree)]
    elif isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)).startswith("$"):
        tag, payload = next(iter(tree.items()))
        kind = "dict with keys that are not texts" if tag == "$dict" else tag[1:]
        if tag in _PAIRS:
            items = _pairs(payload)
        elif tag == "$state_dict":
            items = [*_pairs(payload[0]), ("_metadata", payload[1])]
        elif tag in _SEQUENCES:
            items = [(str(i), item) for i, item in enumerate(payload)]
        else:
            yield here, json.dumps(tree, sort_keys=True)
            return
    elif isinstance(tree, dict):
        kind, items = "dict", list(tree.items())
    else:
        yield here, json.dumps(tree)
        return
    yield here, f"{kind} of {len(items)}"
    for key, item in items:
        # A slash in a key is escaped as in the names of leaves: two paths are never the same text.
        yield from plain_values(item, (*path, key.replace("%", "%25").replace("/", "%2F")))


def _pairs(items: list[list[Any]]) -> list[tuple[str, Any]]:
    """Keys as text. Among keys of several types a text is quoted: "0" is not 0."""
    is_plain = all(isinstance(key, str) for key, _ in items)
    return [(key if is_plain else json.dumps(key, sort_keys=True), value) for key, value in items]


def _compare_values(a: dict[str, str], b: dict[str, str]) -> Iterator[Difference]:
    for path, value in a.items():
        if b.get(path) != value:
            found = b.get(path, "missing")
            yield Difference(path, f"is {_short(value)} uninterrupted, {_short(found)} killed", False)
    for path, value in b.items():
        if path not in a:
            yield Difference(path, f"is only in the killed run: {_short(value)}", False)


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
