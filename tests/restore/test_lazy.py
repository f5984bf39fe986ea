"""A rank that comes back reads its own record, and of the others only those that hold what it lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import DamagedError
from stepwell.restore import needed_records
from stepwell.restore.whole import Part, Whole
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import LeafEntry, Record, absent_leaf
from tests.restore.test_whole import Piece, boxes, piece, read, tilings, write

RANKS = 8


class Records:
    """Parts whose records are read when they are asked for; `read` says whose were."""

    def __init__(
        self, ranks: Sequence[Sequence[Piece]], *, elsewhere: bool = True, partners: Sequence[int] = ()
    ) -> None:
        parts, self.images = write(ranks)
        names = {leaf.name: leaf for part in parts for leaf in part.record.leaves if not leaf.private}
        self.read: list[int] = []
        self.parts = [self._late(self._complete(part.record, names, partners, elsewhere)) for part in parts]

    def _complete(self, record: Record, names: dict[str, LeafEntry], partners: Sequence[int], is_known: bool) -> Record:
        here = {leaf.name for leaf in record.leaves}
        rest = tuple(
            absent_leaf(name, leaf.dtype, leaf.global_shape, "cpu", None)
            for name, leaf in names.items()
            if name not in here
        )
        return replace(record, elsewhere=rest, partners=tuple(partners)) if is_known else record

    def _late(self, record: Record) -> Part:
        def load() -> Record:
            self.read.append(record.owner.rank)
            return record

        return Part(load, lambda file: None)  # type: ignore[arg-type,return-value]

    def check(self, whole: Whole, tensors: dict[str, torch.Tensor], wanted: dict[str, Box]) -> None:
        found, _ = read(whole, self.images, wanted)
        for name, box in wanted.items():
            expected = tensors[name][tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]
            assert torch.equal(found[name], expected)


def sharded(tensors: dict[str, torch.Tensor], ranks: int = RANKS) -> list[list[Piece]]:
    """Rows of each tensor, as even as they go; the last ranks may have none."""
    out: list[list[Piece]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        size = -(-len(tensor) // ranks)
        for rank in range(ranks):
            first, last = min(len(tensor), rank * size), min(len(tensor), (rank + 1) * size)
            if last > first:
                out[rank].append(piece(name, tensor, Box.whole(tensor.shape).rows(first, last)))
    return out


TENSORS = {"large": torch.rand(40, 3), "small": torch.rand(3, 2), "scalar": torch.rand(())}


def held(rank: int, name: str, ranks: int = RANKS) -> Box:
    size = -(-len(TENSORS[name]) // ranks)
    rows = len(TENSORS[name])
    return Box.whole(TENSORS[name].shape).rows(min(rows, rank * size), min(rows, (rank + 1) * size))


@pytest.mark.parametrize("rank", [0, 2, 7])
def test_what_a_rank_stores_itself_needs_its_own_record_alone(rank: int) -> None:
    records = Records(sharded({name: TENSORS[name] for name in ("large", "small")}))
    whole = Whole(records.parts, rank, is_lazy=True)
    wanted = {name: held(rank, name) for name in ("large", "small")}  # of the small one the last ranks hold no row
    assert whole.leaves.keys() == wanted.keys() and not whole.lacking(wanted)
    records.check(whole, TENSORS, wanted)
    assert records.read == [rank]


def test_control_a_record_of_an_older_version_is_read_with_all_others() -> None:
    records = Records(sharded({"large": TENSORS["large"]}), elsewhere=False)
    whole = Whole(records.parts, 3, is_lazy=True)
    records.check(whole, TENSORS, {"large": held(3, "large")})
    assert records.read == [3, *(rank for rank in range(RANKS) if rank != 3)]


def test_what_all_ranks_hold_is_read_from_those_that_store_it() -> None:
    """Two of eight store the rows, and one of them a scalar: nobody reads more than these records and its own."""
    whole_box = Box.whole(TENSORS["large"].shape)
    ranks: list[list[Piece]] = [[] for _ in range(RANKS)]
    ranks[0] = [piece("large", TENSORS["large"], whole_box.rows(0, 25))]
    ranks[4] = [
        piece("large", TENSORS["large"], whole_box.rows(25, 40)),
        piece("scalar", TENSORS["scalar"], Box.whole(())),
    ]
    records = Records(ranks, partners=(0, 4))
    whole = Whole(records.parts, 6, is_lazy=True)
    wanted = {name: Box.whole(TENSORS[name].shape) for name in ("large", "scalar")}
    assert not whole.lacking(wanted)
    records.check(whole, TENSORS, wanted)
    assert records.read == [6, 0, 4]


def test_copies_that_differ_are_seen_in_the_records_that_are_read() -> None:
    records = Records([[piece("w", TENSORS["small"], Box.whole((3, 2)).rows(rank, rank + 1))] for rank in range(3)])
    parts = [
        Part(replace(part.record, copies={"0-2": f"{rank // 2}" * 16}, partners=(0, 1, 2)), part.open_source)
        for rank, part in enumerate(records.parts)
    ]
    whole = Whole(parts, 0, is_lazy=True)
    with pytest.raises(DamagedError, match="0-2"):
        whole.lacking({"w": Box.whole((3, 2))})


def answers(records: Records, size: int, questions: Sequence[needed_records.Wanted]) -> list[list[int]]:
    """What each rank of `size` hears, after its question has travelled: each record is read by one of them."""
    sent = [needed_records.load(json.loads(json.dumps(needed_records.dump(question)))) for question in questions]
    told = []
    for rank in range(size):
        mine = [records.parts[number].record for number in needed_records.turns(rank, size, len(records.parts))]
        told.append(needed_records.answer(mine, sent))
    return [sorted(number for found in told for number in found.get(str(rank), ())) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_another_number_of_ranks_reads_only_the_records_that_hold_its_boxes(size: int) -> None:
    names = ("large", "small")
    records = Records(sharded({name: TENSORS[name] for name in names}))
    wanted = [{name: held(rank, name, size) for name in names} for rank in range(size)]
    wholes = [Whole(records.parts, None, is_lazy=True) for _ in range(size)]
    shapes = {name: tuple(TENSORS[name].shape) for name in names}
    records.read.clear()
    heard = answers(records, size, [needed_records.ask(mine, shapes) for mine in wanted])
    assert len(set(records.read)) == len(records.read) == RANKS - 1, "each once, by one of all ranks; rank 0's is known"
    for rank, (whole, mine) in enumerate(zip(wholes, wanted, strict=True)):
        whole.look_into(heard[rank])
        records.check(whole, TENSORS, mine)
        assert len(heard[rank]) <= RANKS // size + 3
        assert whole._known <= {0, *heard[rank]}, "the fallback that reads all was not needed"


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.integers(1, 4))
def test_any_boxes_are_found(data: st.DataObject, shape: tuple[int, ...], size: int) -> None:
    """Whatever a rank wants of whatever others wrote: what it hears of makes it up."""
    tensor = torch.rand(shape)
    ranks = [[piece("w", tensor, box)] for _, box in data.draw(tilings(Box.whole(shape), 1))]
    records = Records(ranks)
    wanted = [data.draw(boxes(shape)) for _ in range(size)]
    heard = answers(records, size, [needed_records.ask({"w": box}, {"w": shape}) for box in wanted])
    for rank, box in enumerate(wanted):
        whole = Whole(records.parts, None, is_lazy=True)
        whole.look_into(heard[rank])
        records.check(whole, {"w": tensor}, {"w": box})
        assert whole._known <= {0, *heard[rank]}


def test_what_no_record_holds_is_damage() -> None:
    """After all of them were looked into: nobody is told of a lack that is none."""
    ranks = sharded({"large": TENSORS["large"]})
    records = Records([ranks[0], *([] for _ in range(3)), *ranks[4:]])
    whole = Whole(records.parts, 0, is_lazy=True)
    with pytest.raises(DamagedError, match="do not make up leaf 'large'"):
        list(whole.plan({"large": Box.whole((40, 3))}))


@pytest.mark.parametrize(
    "change",
    [
        {"elsewhere": [{"name": "w", "dtype": "float33", "global_shape": [1], "device": "cpu"}]},
        {"elsewhere": [{"name": "w", "dtype": "float32", "global_shape": [-1], "device": "cpu"}]},
        {"elsewhere": [{"name": "w", "dtype": "float32", "global_shape": [2], "device": "/dev"}]},
        {"elsewhere": [{"name": "w", "dtype": "float32", "global_shape": [2], "device": "cpu", "strides": [3]}]},
        {"elsewhere": [{"name": "w", "dtype": "float32", "global_shape": [2], "device": "cpu"}] * 2},
        {"elsewhere": {}},
        {"elsewhere": [], "partners": [2]},
        {"elsewhere": [], "partners": ["0"]},
        {"elsewhere": []},
    ],
)
def test_what_is_said_of_leaves_elsewhere_is_checked(change: dict[str, Any]) -> None:
    from stepwell.storage.format.document import seal

    record = Records([[piece("v", TENSORS["small"], Box.whole((3, 2)))], []]).parts[1].record
    good = replace(record, files=(replace(record.files[0], blocks=("0" * 16,)),), partners=(0,))
    assert Record.load(good.dump(), path="x") == good
    document = json.loads(good.dump())
    for key in ("checksum", "elsewhere", "partners"):
        del document[key]
    with pytest.raises(DamagedError):
        Record.load(seal(document | change), path="x")
