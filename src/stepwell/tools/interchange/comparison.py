"""Two checkpoints side by side: what is only in one, what changed its shape or type, and which bytes differ.

Owns:    matching by path in the state, reading both in step, a few blocks of memory of each rank.
Holds:   every byte that is compared was checked against its checksum; equal means equal bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.restore.whole import Whole
from stepwell.storage.format import dtypes, tree
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import LeafEntry
from stepwell.tools.interchange.merged import tree_of
from stepwell.tools.interchange.numbers import Distance, distance
from stepwell.tools.interchange.outline import OutlineNode, outline, value_text
from stepwell.tools.interchange.reading import OnBytes, Tensors

_CHUNK_BYTES: Final = 1 << 20
_MOST_POSITIONS: Final = 4
"""More positions of one sequence that differ are told as a number."""


@dataclass(frozen=True)
class Change:
    """One difference. `kind`: only in a, only in b, kind, shape, dtype, strides, tied, bytes, value, file."""

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


def compare(a: Whole, b: Whole, on_bytes: OnBytes | None = None) -> Comparison:
    """Compare two checkpoints, whatever the ranks that wrote them. Raises DamagedError.

    What each rank has of its own is compared rank by rank if both were written by as many; else that of rank 0.
    """
    found = _compare(a, b, on_bytes)
    changes, values, tensors = list(found.changes), found.equal_values, found.equal_tensors
    if len(a.parts) == len(b.parts):
        for rank in range(1, len(a.parts)):
            more = _compare(Whole(a.parts, rank), Whole(b.parts, rank), on_bytes, only_own=True)
            # What rank 0 has told already is the same difference, not another one.
            new = [change for change in more.changes if change not in found.changes]
            changes += [replace(change, path=f"{change.path} (rank {rank})") for change in new]
            tensors += more.equal_tensors
    return Comparison(changes + list(_file_changes(a, b)), tensors, values)


def _compare(a: Whole, b: Whole, on_bytes: OnBytes | None, *, only_own: bool = False) -> Comparison:
    """`only_own`: of tensors those that are the rank's own on both sides."""
    trees = [side.record.tree if only_own else tree_of(side) for side in (a, b)]
    nodes_a, nodes_b = (dict(outline(encoded).walk()) for encoded in trees)
    changes: list[Change] = []
    pairs: list[tuple[tree.Path, LeafEntry, LeafEntry]] = []
    ties_a, ties_b = _ties(nodes_a), _ties(nodes_b)
    equal_values = 0
    for path in [*nodes_a, *(path for path in nodes_b if path not in nodes_a)]:
        x, y = nodes_a.get(path), nodes_b.get(path)
        if x is None or y is None:
            changes += _only(path, x, y)
        elif x.kind != y.kind:
            changes.append(Change("kind", tree.show(path), x.kind, y.kind))
        elif x.leaf is not None and y.leaf is not None:
            pair = (path, _entry(a, x.leaf), _entry(b, y.leaf))
            if only_own and not (pair[1].private and pair[2].private):
                continue
            found = _shape_changes(*pair, x, y)
            if ties_a[path] != ties_b[path]:
                found.append(Change("tied", tree.show(path), _tie(ties_a[path]), _tie(ties_b[path])))
            changes += found
            if all(change.kind in ("strides", "tied") for change in found):
                pairs.append(pair)
        elif x.is_container:
            changes += _key_changes(path, x, y)
        elif x.kind == "value":
            if x.value == y.value and type(x.value) is type(y.value):
                equal_values += 1
            else:
                changes.append(Change("value", tree.show(path), value_text(x.value), value_text(y.value)))
    changes = list(_fold(changes, nodes_a))
    different = list(_byte_changes(pairs, a, b, on_bytes))
    return Comparison(changes + different, len(pairs) - len(different), equal_values)


def _entry(whole: Whole, name: str) -> LeafEntry:
    if name not in whole.leaves:
        raise DamagedError(f"the record lacks leaf {name!r}", leaf=name)
    return whole.leaves[name]


def _ties(nodes: dict[tree.Path, OutlineNode]) -> dict[tree.Path, tree.Path | None]:
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


def _only(path: tree.Path, x: OutlineNode | None, y: OutlineNode | None) -> list[Change]:
    """What is missing on one side. A container is told by what it holds, unless it is empty."""
    node = x if x is not None else y
    assert node is not None
    if node.children:
        return []
    kind = "only in a" if y is None else "only in b"
    what = value_text(node.value) if node.kind == "value" else node.kind
    return [Change(kind, tree.show(path), *((what, None) if y is None else (None, what)))]


def _key_changes(path: tree.Path, x: OutlineNode, y: OutlineNode) -> list[Change]:
    """Keys that read the same and are not: 1 and "1"."""
    shared = {key for key, _ in x.children} & {key for key, _ in y.children}
    kinds = [(key, x.key_kinds.get(key, "str"), y.key_kinds.get(key, "str")) for key in sorted(shared)]
    return [Change("kind", tree.show((*path, key)), f"key {a}", f"key {b}") for key, a, b in kinds if a != b]


def _shape_changes(path: tree.Path, a: LeafEntry, b: LeafEntry, x: OutlineNode, y: OutlineNode) -> list[Change]:
    found = []
    where = tree.show(path)
    if a.dtype != b.dtype:
        found.append(Change("dtype", where, a.dtype, b.dtype))
    if a.global_shape != b.global_shape:
        found.append(Change("shape", where, str(list(a.global_shape)), str(list(b.global_shape))))
    elif a.strides != b.strides:
        found.append(Change("strides", where, _strides(a), _strides(b)))
    if x.value != y.value:
        found.append(Change("kind", where, str(x.value), str(y.value)))
    return found


def _strides(entry: LeafEntry) -> str:
    return "row by row" if entry.strides is None else str(list(entry.strides))


def _fold(changes: list[Change], nodes: dict[tree.Path, OutlineNode]) -> Iterator[Change]:
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
    pairs: list[tuple[tree.Path, LeafEntry, LeafEntry]], a: Whole, b: Whole, on_bytes: OnBytes | None
) -> Iterator[Change]:
    """Read both sides in the order of `a`'s files. A pair of leaves that several paths share is read once."""
    known: dict[tuple[str, str], Distance] = {}
    with ExitStack() as stack:
        sides = [Tensors(side) for side in (a, b)]
        for side in sides:
            stack.callback(side.close)
        for path, x, y in sorted(pairs, key=lambda pair: (pair[1].file, pair[1].start)):
            key = (x.name, y.name)
            if key not in known:
                known[key] = _leaf_distance(sides, x, y, on_bytes)
            if known[key].different:
                elements = dtypes.element_count(x.global_shape)
                yield Change("bytes", tree.show(path), elements=elements, distance=known[key])


def _leaf_distance(sides: list[Tensors], x: LeafEntry, y: LeafEntry, on_bytes: OnBytes | None) -> Distance:
    found = Distance()
    for box in _chunks(x.global_shape, _CHUNK_BYTES // dtypes.itemsize(x.dtype)):
        left, right = bytes(sides[0].read(x.name, box)), bytes(sides[1].read(y.name, box))
        found += distance(x.dtype, left, right)
        if on_bytes is not None:
            on_bytes(len(left))
    return found


def _chunks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most so many elements, one after the other as the elements lie, that make up a tensor."""
    if dtypes.element_count(shape) <= most:
        yield Box.whole(shape)
        return
    inner = dtypes.element_count(shape[1:])
    if inner > most:
        for row in range(shape[0]):
            for box in _chunks(shape[1:], most):
                yield Box((row, *box.offsets), (1, *box.shape))
        return
    step = most // inner
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        yield Box.whole(shape).rows(first, last)


def _file_changes(a: Whole, b: Whole) -> Iterator[Change]:
    """Files that the user attached, by their checksums."""
    left, right = (
        {file.name: file for part in side.parts for file in part.record.files if file.kind == "opaque"}
        for side in (a, b)
    )
    for name in sorted(left.keys() | right.keys()):
        x, y = left.get(name), right.get(name)
        if x is None or y is None:
            yield Change("only in a" if y is None else "only in b", name, *_sizes(x, y))
        elif (x.nbytes, x.block_bytes, x.blocks) != (y.nbytes, y.block_bytes, y.blocks):
            yield Change("file", name, *_sizes(x, y))


def _sizes(x: Any, y: Any) -> tuple[str | None, str | None]:
    left, right = (None if file is None else f"{file.nbytes} bytes" for file in (x, y))
    return left, right
