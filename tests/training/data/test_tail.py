"""The end of an epoch, and ranks: no sample missed or repeated, whatever the sizes are, and whenever they change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import stepwell
from stepwell.errors import ConfigError, DataError
from stepwell.training.data.batches import Batches
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.cut import TAILS, Cut
from stepwell.training.data.sampler import PlainSampler
from stepwell.training.data.source import Source
from stepwell.training.data.source_choice import make_source

Seen = list[tuple[int, int]]


class Indices(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loader(count: int, size: int | None, **options: Any) -> stepwell.DataLoader:
    return stepwell.DataLoader(Indices(count), size, True, **{"seed": 5, **options})


def source(count: int, size: int, **options: Any) -> Source:
    return make_source(loader(count, size, **options), 5)


def batches(made: Source, at: Cursor) -> list[list[int]]:
    return [batch.tolist() for batch in made.open(at)]


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 7, 23, 24, 50, 70])
def test_carry_has_full_batches_and_each_sample_once_in_each_epoch(size: int) -> None:
    made, at, stream = source(23, size), Cursor(), []
    for epoch in range(12):
        assert at.epoch == epoch
        found = batches(made, at)
        assert made.left(at) == len(found)
        for batch in found:
            assert len(batch) == size
            at = made.after(at)
        stream += [item for batch in found for item in batch]
        at = made.following(at)
    orders = [item for epoch in range(12) for item in whole(23, epoch)]
    assert stream[: 12 * 23] == orders[: len(stream)], "the epochs one after the other, as if there were no edge"


def whole(count: int, epoch: int) -> list[int]:
    """The order of an epoch."""
    return [item for batch in batches(source(count, count, tail="drop"), Cursor(epoch)) for item in batch]


@pytest.mark.parametrize("size", [4, 7, 23, 24])
def test_the_other_tails(size: int) -> None:
    order = whole(23, 2)
    pieces = [order[first : first + size] for first in range(0, 23, size)]
    assert batches(source(23, size, tail="partial"), Cursor(2)) == pieces
    assert batches(source(23, size, tail="drop"), Cursor(2)) == [piece for piece in pieces if len(piece) == size]
    padded = batches(source(23, size, tail="pad"), Cursor(2))
    assert padded[:-1] == pieces[:-1]
    assert padded[-1] == (pieces[-1] + order)[:size]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("size", [1, 4, 30, None])
def test_a_resume_at_every_batch_is_the_tail(tail: str, size: int | None) -> None:
    made = make_source(loader(23, size, tail=tail), 5)
    at = Cursor(3, 0, 2 if tail == "carry" else 0)
    found = [batch if size is None else batch.tolist() for batch in made.open(at)]
    for skip in range(len(found) + 1):
        assert made.left(at) == len(found) - skip
        assert [batch if size is None else batch.tolist() for batch in made.open(at)] == found[skip:]
        at = made.after(at)


@pytest.mark.parametrize("tail", TAILS)
def test_no_samples_no_batches(tail: str) -> None:
    made = PlainSampler([], Cut(4, tail), 5)
    assert list(made) == [] and made.left(Cursor()) == 0 and made.is_over(Cursor())
    assert made.following(Cursor()) == Cursor(1)


# -- ranks ------------------------------------------------------------------------------------------------------------

sizes, worlds = st.integers(1, 9), st.integers(1, 8)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 90), sizes, worlds, st.sampled_from(TAILS), st.integers(0, 40))
def test_ranks_share_a_batch_and_agree_where_they_are(count: int, size: int, world: int, tail: str, start: int) -> None:
    cuts = [Cut(size, tail, rank, world) for rank in range(world)]
    places = [Cursor(0, 0, min(start, count))] * world
    covered: list[int] = []
    while not cuts[-1].is_over(places[0], count):
        share = []
        at = places[0]
        for rank, cut in enumerate(cuts):
            if cut.left(at, count):
                assert places[rank] == at
                share += list(cut.positions(at.samples, count))
                places[rank] = cut.after(at, count)
            else:
                assert tail == "partial" and not cut.is_over(at, count)
        assert share == list(range(share[0], share[0] + len(share))), "one piece, in the order of ranks"
        covered += share
    assert all(cut.left(place, count) == 0 for cut, place in zip(cuts, places, strict=True))
    assert covered == list(range(min(start, count), min(start, count) + len(covered)))
    short = count - min(start, count) - len(covered)
    assert {"partial": short == 0, "drop": 0 <= short < size * world, "carry": short <= 0, "pad": short <= 0}[tail]


def batch(order: PlainSampler, at: Cursor) -> Seen:
    """The first batch from a position, with the epoch of each sample."""
    order.seek(at)
    ticket = next(iter(order))
    epochs = [ticket.epochs] * len(ticket.indices) if isinstance(ticket.epochs, int) else ticket.epochs
    return list(zip(epochs, ticket.indices, strict=True))


@pytest.mark.parametrize("tail", ["carry", "partial"])
@pytest.mark.parametrize("chance", range(10))
def test_world_and_batch_sizes_change_at_random(tail: str, chance: int) -> None:
    dice = random.Random(chance)
    count = dice.choice([50, 97, 128, 301])
    seen: Seen = []
    at = Cursor()
    while at.epoch < 3:
        size, world = dice.randint(1, 9), dice.choice([4, 2, 8, 1, 3, 6])
        ranks = [Cut(size, tail, rank, world) for rank in range(world)]
        orders = [PlainSampler(range(count), cut, 5, keyed=True) for cut in ranks]
        for _ in range(dice.randint(1, 5)):
            if not ranks[0].left(at, count):
                at = ranks[0].following(at, count)
            for cut, order in zip(ranks, orders, strict=True):
                seen += batch(order, at) if cut.left(at, count) else []
            at = ranks[0].after(at, count)
    times = Counter(pair for pair in seen if pair[0] < 3)
    assert set(times.values()) == {1} and len(times) == 3 * count


class Ranks:
    """A world of loops, each over its own `ckpt.data`; the state of rank 0 is what a checkpoint keeps."""

    def __init__(self, count: int, size: int, world: int, saved: dict[str, Any] | None, **options: Any) -> None:
        self.loops = []
        for rank in range(world):
            data = Batches([])
            data.attach(make_source(loader(count, size, rank=rank, world_size=world, **options), 5))
            if saved is not None:
                assert data.drift(saved) == ""
                data.seek(data.read(saved))
            self.loops.append(data)
        self._rounds = [iter(data) for data in self.loops]

    def step(self) -> list[int]:
        """One global batch; at the end of an epoch the next one begins, as in a loop without `ckpt.epochs()`."""
        found: list[int] = []
        for rank, data in enumerate(self.loops):
            try:
                batch = next(self._rounds[rank])
            except StopIteration:
                self._rounds[rank] = iter(data)
                batch = next(self._rounds[rank])
            found += batch.tolist()
        return found

    def saved(self) -> dict[str, Any]:
        states = [data.saved(data.at) for data in self.loops]
        assert all(state == states[0] for state in states), "the ranks agree"
        return states[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_world_size_4_2_8_1_in_the_middle_of_epochs(workers: int) -> None:
    """Through the state of a checkpoint, the batch size changing as well; two epochs and more."""
    count, saved = 211, None
    stream: list[int] = []
    for world, size, steps in ((4, 3, 7), (2, 5, 4), (8, 3, 4), (1, 7, 5), (4, 9, 3), (2, 16, 3), (1, 1, 5)):
        options = {"num_workers": workers if world < 3 else 0}
        ranks = Ranks(count, size, world, saved, **options)
        for _ in range(steps):
            batch = ranks.step()
            assert len(batch) == size * world
            stream += batch
        saved = ranks.saved()
    assert len(stream) > 2 * count
    assert stream == [item for epoch in range(4) for item in whole(count, epoch)][: len(stream)]


def test_the_same_global_batch_has_the_same_members_in_any_world() -> None:
    worlds = [Ranks(211, 24 // world, world, None) for world in (1, 2, 3, 4, 8)]
    for _ in range(20):
        first, *others = [ranks.step() for ranks in worlds]
        assert all(other == first for other in others)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_s_distributed_sampler_is_replaced(drop: bool, shuffle: bool) -> None:
    def made(rank: int) -> Source:
        data = Indices(23)
        sampler = DistributedSampler(data, 3, rank, shuffle=shuffle, drop_last=drop)
        return make_source(DataLoader(data, batch_size=4, sampler=sampler), 5)

    parts = [batches(made(rank), Cursor(1)) for rank in range(3)]
    assert made(0).order == ("feistel6/1" if shuffle else "sequential") and made(0).size() == 12
    assert [len(part) for part in parts] == ([1] * 3 if drop else [2] * 3)
    times = Counter(item for part in parts for batch in part for item in batch)
    assert sum(times.values()) == (12 if drop else 24)
    assert drop or set(times) == set(range(23)), "padded by one"


# -- the position of a checkpoint -------------------------------------------------------------------------------------


def opened(count: int, size: int, **options: Any) -> Batches:
    return Ranks(count, size, 1, None, **options).loops[0]


def test_the_end_of_an_epoch_tells_what_the_next_one_has_lost() -> None:
    data = opened(10, 4)
    assert len(list(data)) == 3
    saved = data.saved(data.at)
    assert {"samples": 12, "length": 10, "order": "feistel6/1", "ended": True}.items() <= saved["data"].items()
    again = opened(10, 3)
    again.seek(again.read(saved))
    assert list(again) == [] and again.start(1) == Cursor(1, 0, 2)
    assert opened(11, 3).drift(saved) == "the data set had 10 samples and has 11 now, in the middle of epoch 1"
    dropping = opened(10, 4, tail="drop")
    dropping.seek(dropping.read(saved))
    assert list(dropping) == [] and dropping.start(1) == Cursor(1, 0, 2), "whatever the tail is now"


def test_an_epoch_that_only_began_inside_a_batch_is_in_its_middle() -> None:
    data = opened(10, 4)
    list(data)
    saved = data.saved(data.following())
    assert saved["consumed"] == 0 and saved["data"]["samples"] == 2
    assert "in the middle of epoch 1" in opened(11, 4).drift(saved)
    assert opened(10, 4).read(saved) == Cursor(1, 0, 2)


# -- alone ------------------------------------------------------------------------------------------------------------


def test_alone_it_goes_on_where_it_was_left() -> None:
    made = loader(10, 4)
    assert len(made) == 3 and made.batch_size == 4 and len(made.dataset) == 10
    stream = []
    for batch in made:
        stream += batch.tolist()
        if len(stream) == 8:
            break
    state = made.state_dict()
    assert state == {"epoch": 0, "batches": 2, "samples": 8, "length": 10, "order": "feistel6/1", "seed": 5}
    other = loader(10, 4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for _ in range(2):
        stream += [item for batch in other for item in batch.tolist()]
    assert stream == (whole(10, 0) + whole(10, 1))[:20]
    with pytest.raises(DataError, match="length was 10 and is 11"):
        loader(11, 4).load_state_dict(state)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "wrap"}, "give one of carry, drop, partial, pad"),
        ({"rank": 2, "world_size": 2}, "ranks count from 0"),
        ({"drop_last": True}, "drop_last= belongs to torch's own"),
        ({"sampler": [1]}, "sampler= belongs to torch's own"),
        ({"dataset": Stream()}, "map-style"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stepwell.DataLoader(**{"dataset": Indices(3), **options})


def test_the_public_name() -> None:
    assert issubclass(stepwell.DataLoader, DataLoader)
    assert torch.utils.data.DataLoader is DataLoader
