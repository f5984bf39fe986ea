"""Two checkpoints side by side: what is only in one, what changed its shape or type, and which bytes differ.

Owns:    matching by path in the state, reading both in step, a few blocks of memory.
Holds:   every byte that is compared was checked against its checksum; equal means equal bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from stepwell.errors import DamagedError
from stepwell.format import dtypes, tree
from stepwell.format.record import LeafEntry, Record
from stepwell.interchange.numbers import Distance, distance
from stepwell.interchange.outline import Node, outline, value_text
from stepwell.interchange.reading import OnBytes
from stepwell.restore.read import FileSource, read_file

_CHUNK_BYTES: Final = 1 << 20
Known = dict[tuple[str, str], Distance]
"""How far two leaves are apart, by their names."""
_MOST_POSITIONS: Final = 4
"""More positions of one sequence that differ are told as a number."""


@dataclass(frozen=True)
class Change:
    """One difference. `kind`: only in a, only in b, kind, shape, dtype, tied, bytes, value, file."""

    kind: str
    path: str
    a: str | None = None
    b: str | None = None
    elements: int | None = None
    distance: Distance | None = None


@dataclass(frozen=True)
class Comparison:
    """All differences, and how much was equal."""

    changes: list[Change]
    equal_tensors: int
    equal_values: int


class Reader(Protocol):
    """One side of a comparison: a record, its leaves by name, and their bytes."""

    record: Record
    entries: dict[str, LeafEntry]

    def read(self, leaf: LeafEntry, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of a leaf. Raises DamagedError."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class BlockReader:
    """Verified bytes of leaves on demand. Keeps the last block of each file."""

    def __init__(self, record: Record, directory: Path) -> None:
        self.record = self._record = record
        self.entries = {leaf.name: leaf for leaf in record.leaves}
        self._directory = directory
        self._sources: dict[int, FileSource] = {}
        self._blocks: dict[int, tuple[int, bytearray]] = {}

    def read(self, leaf: LeafEntry, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of a leaf. Raises DamagedError."""
        block_bytes = self._record.files[leaf.file].block_bytes
        position, parts = leaf.start + offset, []
        while nbytes:
            number, inside = divmod(position, block_bytes)
            part = bytes(memoryview(self._block(leaf, number))[inside : inside + nbytes])
            parts.append(part)
            position, nbytes = position + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, leaf: LeafEntry, number: int) -> bytearray:
        held = self._blocks.get(leaf.file)
        if held is not None and held[0] == number:
            return held[1]
        file = self._record.files[leaf.file]
        if leaf.file not in self._sources:
            self._sources[leaf.file] = FileSource(self._directory / file.name)
        start = number * file.block_bytes
        end = min(start + file.block_bytes, file.nbytes)
        block = bytearray(end - start)

        def deliver(_: LeafEntry, offset: int, data: memoryview) -> None:
            block[offset : offset + len(data)] = data

        whole = replace(leaf, start=start, end=end)  # a leaf that is exactly this block
        read_file(self._sources[leaf.file], file, [whole], deliver, check_all=False)
        self._blocks[leaf.file] = (number, block)
        return block

    def close(self) -> None:
        """Close the files."""
        for source in self._sources.values():
            source.close()


def compare(a: tuple[Record, Path], b: tuple[Record, Path], on_bytes: OnBytes | None = None) -> Comparison:
    """Compare two checkpoints, each given by its record and its directory. Raises DamagedError."""
    with contextlib.closing(BlockReader(*a)) as left, contextlib.closing(BlockReader(*b)) as right:
        return compare_readers(left, right, on_bytes)


def compare_readers(a: Reader, b: Reader, on_bytes: OnBytes | None = None, known: Known | None = None) -> Comparison:
    """Compare two sides. `known`: leaves whose bytes were compared before; new ones are added."""
    nodes_a, nodes_b = (dict(outline(side.record.tree).walk()) for side in (a, b))
    changes: list[Change] = []
    pairs: list[tuple[tree.Path, LeafEntry, LeafEntry]] = []
    entries_a, entries_b = a.entries, b.entries
    ties_a, ties_b = _ties(nodes_a), _ties(nodes_b)
    equal_values = 0
    for path in [*nodes_a, *(path for path in nodes_b if path not in nodes_a)]:
        x, y = nodes_a.get(path), nodes_b.get(path)
        if x is None or y is None:
            changes += _only(path, x, y)
        elif x.kind != y.kind:
            changes.append(Change("kind", tree.show(path), x.kind, y.kind))
        elif x.leaf is not None and y.leaf is not None:
            pair = (path, _entry(entries_a, x.leaf), _entry(entries_b, y.leaf))
            found = _shape_changes(*pair, x, y)
            if ties_a[path] != ties_b[path]:
                found.append(Change("tied", tree.show(path), _tie(ties_a[path]), _tie(ties_b[path])))
            changes += found
            if not found or found[0].kind == "tied":
                pairs.append(pair)
        elif x.is_container:
            changes += _key_changes(path, x, y)
        elif x.kind == "value":
            if x.value == y.value and type(x.value) is type(y.value):
                equal_values += 1
            else:
                changes.append(Change("value", tree.show(path), value_text(x.value), value_text(y.value)))
    changes = list(_fold(changes, nodes_a))
    different = list(_byte_changes(pairs, a, b, on_bytes, {} if known is None else known))
    files = list(_file_changes(a.record, b.record))
    return Comparison(changes + different + files, len(pairs) - len(different), equal_values)


def _entry(entries: dict[str, LeafEntry], name: str) -> LeafEntry:
    if name not in entries:
        raise DamagedError(f"the record lacks leaf {name!r}", leaf=name)
    return entries[name]


def _ties(nodes: dict[tree.Path, Node]) -> dict[tree.Path, tree.Path | None]:
    """For every tensor the first path of the same tensor, None if that is its own."""
    first: dict[str, tree.Path] = {}
    found: dict[tree.Path, tree.Path | None] = {}
    for path, node in nodes.items():
        if node.leaf is not None:
            origin = first.setdefault(node.leaf, path)
            found[path] = None if origin == path else origin
    return found


def _tie(path: tree.Path | None) -> str:
    return "its own" if path is None else f"tied to {tree.show(path)}"


def _only(path: tree.Path, x: Node | None, y: Node | None) -> list[Change]:
    """What is missing on one side. A container is told by what it holds, unless it is empty."""
    node = x if x is not None else y
    assert node is not None
    if node.children:
        return []
    kind = "only in a" if y is None else "only in b"
    what = value_text(node.value) if node.kind == "value" else node.kind
    return [Change(kind, tree.show(path), *((what, None) if y is None else (None, what)))]


def _key_changes(path: tree.Path, x: Node, y: Node) -> list[Change]:
    """Keys that read the same and are not: 1 and "1"."""
    shared = {key for key, _ in x.children} & {key for key, _ in y.children}
    kinds = [(key, x.key_kinds.get(key, "str"), y.key_kinds.get(key, "str")) for key in sorted(shared)]
    return [Change("kind", tree.show((*path, key)), f"key {a}", f"key {b}") for key, a, b in kinds if a != b]


def _shape_changes(path: tree.Path, a: LeafEntry, b: LeafEntry, x: Node, y: Node) -> list[Change]:
    found = []
    where = tree.show(path)
    if a.dtype != b.dtype:
        found.append(Change("dtype", where, a.dtype, b.dtype))
    if a.shape != b.shape:
        found.append(Change("shape", where, str(list(a.shape)), str(list(b.shape))))
    if x.value != y.value:
        found.append(Change("kind", where, str(x.value), str(y.value)))
    return found


def _fold(changes: list[Change], nodes: dict[tree.Path, Node]) -> Iterator[Change]:
    """Many values of one sequence that differ (a generator's state) are told as one change."""
    lengths = {tree.show(path): len(node.children) for path, node in nodes.items() if not node.is_keyed}

    def parent(change: Change) -> str | None:
        where = change.path.rpartition("/")[0]
        return where if change.kind == "value" and where in lengths else None

    counts = Counter(parent(change) for change in changes)
    told = set()
    for change in changes:
        where = parent(change)
        if where is None or counts[where] <= _MOST_POSITIONS:
            yield change
        elif where not in told:
            told.add(where)
            yield Change("value", where, elements=lengths[where], distance=Distance(counts[where], None))


def _byte_changes(
    pairs: list[tuple[tree.Path, LeafEntry, LeafEntry]],
    a: Reader,
    b: Reader,
    on_bytes: OnBytes | None,
    known: Known,
) -> Iterator[Change]:
    """Read both sides in the order of `a`'s files. A pair of leaves that several paths share is read once."""
    for path, x, y in sorted(pairs, key=lambda pair: (pair[1].file, pair[1].start)):
        key = (x.name, y.name)
        if key not in known:
            known[key] = _leaf_distance(a, b, x, y, on_bytes)
        if known[key].different:
            elements = dtypes.element_count(x.shape)
            yield Change("bytes", tree.show(path), elements=elements, distance=known[key])


def _leaf_distance(a: Reader, b: Reader, x: LeafEntry, y: LeafEntry, on_bytes: OnBytes | None) -> Distance:
    found, size = Distance(), x.end - x.start
    for offset in range(0, size, _CHUNK_BYTES):
        nbytes = min(_CHUNK_BYTES, size - offset)
        left, right = a.read(x, offset, nbytes), b.read(y, offset, nbytes)
        found += distance(x.dtype, left, right)
        if on_bytes is not None:
            on_bytes(nbytes)
    return found


def _file_changes(a: Record, b: Record) -> Iterator[Change]:
    """Files that the user attached, by their checksums."""
    left, right = ({file.name: file for file in side.files if file.kind == "opaque"} for side in (a, b))
    for name in sorted(left.keys() | right.keys()):
        x, y = left.get(name), right.get(name)
        if x is None or y is None:
            yield Change("only in a" if y is None else "only in b", name, *_sizes(x, y))
        elif (x.nbytes, x.block_bytes, x.blocks) != (y.nbytes, y.block_bytes, y.blocks):
            yield Change("file", name, *_sizes(x, y))


def _sizes(x: Any, y: Any) -> tuple[str | None, str | None]:
    left, right = (None if file is None else f"{file.nbytes} bytes" for file in (x, y))
    return left, right
