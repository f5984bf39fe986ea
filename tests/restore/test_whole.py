"""A checkpoint of many ranks as one: what N wrote in any boxes, M read in any others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import DamagedError
from stepwell.restore.whole import Part, Whole
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.types import CheckpointId, Owner

START = 4096


@dataclass(frozen=True)
class Piece:
    """A leaf as one rank wrote it."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    private: bool = False


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def piece(name: str, whole: torch.Tensor, box: Box, **more: Any) -> Piece:
    return Piece(name, whole[slices(box)].contiguous(), tuple(whole.shape), box.offsets, **more)


def write(ranks: Sequence[Sequence[Piece]]) -> tuple[list[Part], list[bytes]]:
    """Records and bytes, as agents would make them."""
    parts, images = [], []
    for rank, pieces in enumerate(ranks):
        entries, data = [], bytes(START)
        for item in pieces:
            payload = item.tensor.numpy().tobytes()
            entries.append(
                LeafEntry(
                    item.name,
                    0,
                    "float32",
                    tuple(item.tensor.shape),
                    len(data),
                    len(data) + len(payload),
                    "value",
                    "cpu",
                    item.global_shape,
                    item.offsets,
                    private=item.private,
                )
            )
            data += payload
        file = FileEntry(f"rank-{rank:05d}.safetensors", "safetensors", len(data), 4096, ())
        record = Record("0" * 16, CheckpointId(1, 0, 1), Owner(rank, len(ranks)), 1.0, (file,), tuple(entries), {})
        parts.append(Part(record, lambda file: None))  # type: ignore[arg-type,return-value]
        images.append(data)
    return parts, images


def read(whole: Whole, images: Sequence[bytes], wanted: dict[str, Box]) -> tuple[dict[str, torch.Tensor], int]:
    """As `load` reads: each box, and how many bytes that took."""
    made = {name: torch.full(box.shape, -1.0) for name, box in wanted.items()}
    taken = 0
    for part, fetches in whole.plan(wanted):
        image = images[part.record.owner.rank]
        for fetch in fetches:
            entry = fetch.entry
            taken += entry.end - entry.start
            values = torch.frombuffer(bytearray(image[entry.start : entry.end]), dtype=torch.float32)
            room = values.view(entry.shape)
            assert fetch.is_whole is (fetch.needed.shape == tuple(room.shape))
            made[entry.name][slices(fetch.target)] = room[slices(fetch.needed)]
    return made, taken


@st.composite
def tilings(draw: st.DrawFn, box: Box, ranks: int) -> list[tuple[int, Box]]:
    """Cut a box into boxes, each with the rank that has it."""
    axes = [axis for axis, size in enumerate(box.shape) if size > 1]
    if not axes or not draw(st.booleans()):
        return [(draw(st.integers(0, ranks - 1)), box)]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.shape[axis] - 1))
    low, high = list(box.shape), list(box.shape)
    low[axis], high[axis] = at, box.shape[axis] - at
    start = list(box.offsets)
    start[axis] += at
    return draw(tilings(Box(box.offsets, tuple(low)), ranks)) + draw(tilings(Box(tuple(start), tuple(high)), ranks))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    pairs = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in pairs), tuple(high - low for low, high in pairs))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), max_size=3).map(tuple), st.integers(1, 4))
def test_any_boxes_in_any_others_out(data: st.DataObject, shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.rand(shape)
    written: list[list[Piece]] = [[] for _ in range(ranks)]
    for number, (rank, box) in enumerate(data.draw(tilings(Box.whole(shape), ranks))):
        # A record has one leaf of a name: what a rank has twice is taken for another rank's.
        place = rank if not any(item.name == "w" for item in written[rank]) else len(written)
        if place == len(written):
            written.append([])
        written[place].append(piece("w", whole, box))
        assert number < 1000
    parts, images = write(written)
    wanted = data.draw(boxes(shape))
    found, taken = read(Whole(parts), images, {"w": wanted})
    assert torch.equal(found["w"], whole[slices(wanted)])
    least = wanted.numel * 4
    rows = sum(
        met.row_count * (item.tensor.numel() * 4 // max(1, Box(item.offsets, tuple(item.tensor.shape)).row_count))
        for items in written
        for item in items
        if (met := Box(item.offsets, tuple(item.tensor.shape)).meet(wanted)) is not None
    )
    assert least <= taken == rows, "only rows of which something is needed"


def halves(whole: torch.Tensor) -> list[list[Piece]]:
    return [[piece("w", whole, Box((0, 0), (2, 3)))], [piece("w", whole, Box((2, 0), (2, 3)))]]


def test_rows_of_one_half_come_from_one_rank() -> None:
    whole = torch.rand(4, 3)
    parts, images = write(halves(whole))
    wanted = {"w": Box((2, 0), (1, 3))}
    assert [part.record.owner.rank for part, _ in Whole(parts).plan(wanted)] == [1]
    found, taken = read(Whole(parts), images, wanted)
    assert torch.equal(found["w"], whole[2:3]) and taken == 12


def test_nothing_is_read_for_nothing() -> None:
    parts, _ = write(halves(torch.rand(4, 3)))
    assert list(Whole(parts).plan({"w": Box((0, 0), (0, 0))})) == []


@pytest.mark.parametrize("how", ["missing", "overlapping", "twice", "another in its place"])
def test_pieces_that_do_not_make_it_up_are_damage(how: str) -> None:
    whole = torch.rand(4, 3)
    written = halves(whole)
    if how == "missing":
        written[1] = []
    elif how == "overlapping":
        written[1] = [piece("w", whole, Box((1, 0), (3, 3)))]
    elif how == "twice":
        written.append(written[0])
    else:
        written[1] = written[0]
    parts, _ = write(written)
    with pytest.raises(DamagedError, match="do not make up leaf 'w'"):
        list(Whole(parts).plan({"w": Box.whole((4, 3))}))


@pytest.mark.parametrize("field", ["dtype", "global_shape", "private"])
def test_records_that_contradict_each_other_are_damage(field: str) -> None:
    parts, _ = write(halves(torch.rand(4, 3)))
    lie = {"dtype": "int32", "global_shape": (5, 3), "private": True}[field]
    (entry,) = parts[0].record.leaves
    told = replace(parts[0].record, leaves=(replace(entry, **{field: lie}),))  # type: ignore[arg-type]
    parts[0] = Part(told, parts[0].open_source)
    with pytest.raises(DamagedError, match="in one record"):
        Whole(parts)


def test_what_is_private_is_this_ranks_own() -> None:
    own = [torch.full((2,), float(rank)) for rank in range(3)]
    parts, images = write([[piece("b", mine, Box.whole((2,)), private=True)] for mine in own])
    for mine in range(3):
        found, _ = read(Whole(parts, mine), images, {"b": Box.whole((2,))})
        assert torch.equal(found["b"], own[mine])


def test_a_private_part_serves_who_holds_that_part_and_nobody_else() -> None:
    whole = torch.rand(4, 3)
    box = Box((2, 0), (2, 3))
    parts, images = write([[], [piece("w", whole, box, private=True)]])
    found, _ = read(Whole(parts, 1), images, {"w": box})
    assert torch.equal(found["w"], whole[2:])
    with pytest.raises(DamagedError, match="do not make up"):
        list(Whole(parts, 1).plan({"w": Box.whole((4, 3))}))
    assert "w" not in Whole(parts, 0).leaves


def test_parts_of_tensors_that_were_not_the_same_are_damage() -> None:
    parts, _ = write(halves(torch.rand(4, 3)))
    told = [
        Part(replace(part.record, copies={"0,1": f"{number}" * 16}), part.open_source)
        for number, part in enumerate(parts)
    ]
    with pytest.raises(DamagedError, match="ranks 0,1 stored parts of tensors that were not the same"):
        Whole(told)
    Whole([told[0], Part(replace(parts[1].record, copies={"0,1": "0" * 16}), parts[1].open_source)])


def test_trained_tensors_of_each_rank_go_to_as_many_ranks_only() -> None:
    """Another number of them would silently get rank 0's. Statistics and generators may be rank 0's."""
    own = [[Piece("w", torch.full((2,), float(rank)), (2,), (0,), private=True)] for rank in range(2)]
    parts, _ = write(own)
    for role, is_bound in (("parameter", True), ("moment1", True), ("optimizer", True), ("buffer", False)):
        given = [
            Part(
                replace(part.record, leaves=tuple(replace(leaf, role=role) for leaf in part.record.leaves)),
                part.open_source,
            )
            for part in parts
        ]
        assert Whole(given, 1).bound_to_ranks() == []
        assert bool(Whole(given, None).bound_to_ranks()) == is_bound
