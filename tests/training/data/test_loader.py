"""The data wrapper: an order that depends on (seed, epoch) alone, a resume at any batch, and nothing read twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from stepwell.errors import DataError
from stepwell.training.data.batches import Batches, Loop
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.loader import DataLoader as OurLoader
from stepwell.training.data.sampler import PlainSampler, Skipping, epoch_seed, make_sampler
from stepwell.training.data.source import LoaderSource, SequenceSource, Source
from stepwell.training.data.source_choice import make_source

N = 23


class Counted(Dataset[int]):
    """Items 0 to 22; counts how often each is read, in whatever process."""

    def __init__(self) -> None:
        self.reads = torch.zeros(N, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's own, whose order depends on a generator it lets us set."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(6, generator=self.generator).tolist()
        return iter([list(range(b * 4, min(N, b * 4 + 4))) for b in order])

    def __len__(self) -> int:
        return 6


class Epochal(Sampler[int]):
    """A sampler whose order depends on `set_epoch` alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * 5 + self.epoch) % N for i in range(N)])

    def __len__(self) -> int:
        return N


class Shuffled(Sampler[int]):
    """Draws from the global generator: cannot be brought back."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())

    def __len__(self) -> int:
        return N


class ShuffledBatches(BatchSampler):
    """Inherits from BatchSampler and shuffles behind its back."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


def loaders() -> dict[str, Any]:
    data = Counted()
    return {
        "in order": DataLoader(data, batch_size=4),
        "shuffled": DataLoader(data, batch_size=4, shuffle=True),
        "drop last": DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        "no batches": DataLoader(data, batch_size=None, shuffle=True),
        "collate": DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda items: [max(items), *items]),
        "own generator": DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "with replacement": DataLoader(
            data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=30)
        ),
        "weighted": DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * N, 20)),
        "subset": DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(5, 20))),
        "distributed": DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=1)),
        "set_epoch": DataLoader(data, batch_size=4, sampler=Epochal()),
        "batch sampler": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, drop_last=False)),
        "own batch sampler": DataLoader(data, batch_sampler=Buckets()),
        "list sampler": DataLoader(data, batch_size=4, sampler=[3, 1, 2, 9, 8]),
        "workers": DataLoader(data, batch_size=4, shuffle=True, num_workers=2),
    }


def further(source: Source, batches: int, epoch: int = 0) -> Cursor:
    at = Cursor(epoch)
    for _ in range(batches):
        at = source.after(at)
    return at


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


@pytest.mark.parametrize("name", loaders())
def test_the_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        torch.manual_seed(random.randrange(1000))
        return plain(make_source(loaders()[name], seed).open(Cursor(epoch)))

    first = order(5, 2)
    assert order(5, 2) == first
    if name not in ("in order", "list sampler"):
        assert order(5, 3) != first
    if name not in ("in order", "list sampler", "set_epoch"):
        assert order(6, 2) != first
    assert make_source(loaders()[name], 5).left(Cursor()) == len(first)


@pytest.mark.parametrize("name", [name for name in loaders() if name != "workers"])
def test_a_resume_at_every_batch_is_the_tail(name: str) -> None:
    source = make_source(loaders()[name], 5)
    whole, at = plain(source.open(Cursor(1))), Cursor(1)
    for skip in range(len(whole) + 1):
        assert source.left(at) == len(whole) - skip
        assert plain(source.open(at)) == whole[skip:]
        at = source.after(at)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_resume_with_workers_is_the_tail(persistent: bool) -> None:
    def make() -> LoaderSource:
        loader = DataLoader(Counted(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent)
        return LoaderSource(loader, 5)

    uninterrupted = make()
    epochs = [plain(uninterrupted.open(Cursor(epoch))) for epoch in (0, 1)]
    assert sorted(item for batch in epochs[0] for item in batch) == list(range(N))
    resumed = make()
    assert plain(resumed.open(further(resumed, 2, 0))) == epochs[0][2:]
    assert plain(resumed.open(Cursor(1))) == epochs[1], "and the next epoch after it"
    assert plain(resumed.open(further(resumed, 6, 1))) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_skipped_is_not_read(workers: int) -> None:
    data = Counted()
    source = LoaderSource(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers), 5)
    whole = plain(source.open(Cursor(0)))
    assert data.reads.tolist() == [1] * N
    data.reads.zero_()
    assert plain(source.open(further(source, 4, 0))) == whole[4:]
    tail = {item for batch in whole[4:] for item in batch}
    assert data.reads.tolist() == [int(index in tail) for index in range(N)]


@pytest.mark.parametrize("name", loaders())
def test_the_global_generators_are_neither_read_nor_moved(name: str) -> None:
    source = make_source(loaders()[name], 5)
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    expected = torch.rand(1), numpy.random.rand(), random.random()
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    plain(source.open(Cursor(0)))
    plain(source.open(further(source, 3, 0)))
    assert (torch.rand(1), numpy.random.rand(), random.random()) == expected


def test_control_the_user_s_own_loader_does_draw_from_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(DataLoader(Counted(), batch_size=4, shuffle=True))
    assert not torch.equal(torch.get_rng_state(), before)


def test_seeds_of_epochs_share_nothing() -> None:
    seeds = {epoch_seed(seed, epoch) for seed in range(30) for epoch in range(30)}
    assert len(seeds) == 900 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert epoch_seed(7, 3) == 8207044240428805746, "a run goes on in the same order under every later version"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


REFUSED = {
    "IterableDataset": lambda: DataLoader(Stream(), batch_size=2),
    "Shuffled": lambda: DataLoader(Counted(), sampler=Shuffled()),
    "ShuffledBatches": lambda: DataLoader(
        Counted(), batch_sampler=ShuffledBatches(SequentialSampler(range(N)), 4, False)
    ),
    "Shuffled in batches": lambda: DataLoader(Counted(), batch_sampler=BatchSampler(Shuffled(), 4, False)),
    "generator": lambda: (i for i in range(3)),
    "dict": lambda: {1: 2},
    "str": lambda: "abc",
    "int": lambda: 5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resumed_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(DataError, match=r"call ckpt\.step") as caught:
        make_source(REFUSED[name](), 1)
    assert name.split()[0] in str(caught.value)


# -- what ckpt.data is ------------------------------------------------------------------------------------------------


class Noting(Loop):
    """Notes what it is told."""

    def __init__(self, source: Any = None, *, is_given: bool = True) -> None:
        self.said: list[str] = []
        self.data = Batches([] if is_given else None)
        self.data.report_to(self)
        if source is not None:
            self.data.attach(source)

    def on_start(self) -> None:
        self.said.append("start")

    def on_request(self) -> None:
        self.said.append("request")

    def on_delivered(self) -> None:
        self.said.append("delivered")


def test_a_delivered_batch_counts_and_the_request_comes_before_it() -> None:
    loop = Noting(SequenceSource(["a", "b"]))
    seen = []
    for batch in loop.data:
        seen.append((batch, loop.data.at.batches, loop.data.is_at_end))
    assert seen == [("a", 1, False), ("b", 2, True)]
    assert loop.said == ["start", "request", "delivered", "request", "delivered", "request"]
    assert len(loop.data) == 2


def test_after_a_break_the_rest_of_the_epoch_is_left() -> None:
    loop = Noting(SequenceSource(list("abcde")))
    for batch in loop.data:
        if batch == "b":
            break
    assert loop.data.at == Cursor(0, 2)
    assert list(loop.data) == ["c", "d", "e"]


def test_the_next_round_is_the_next_epoch() -> None:
    loop = Noting(SequenceSource(list("ab")))
    assert list(loop.data) == ["a", "b"] and loop.data.at.epoch == 0
    assert list(loop.data) == ["a", "b"] and loop.data.at.epoch == 1


def test_seek() -> None:
    loop = Noting(SequenceSource(list("abc")))
    loop.data.seek(Cursor(4, 2))
    assert list(loop.data) == ["c"] and loop.data.at.epoch == 4
    loop.data.seek(Cursor(4, 3))
    assert loop.data.is_at_end and list(loop.data) == []


def test_without_data_it_says_what_to_do() -> None:
    loop = Noting(is_given=False)
    with pytest.raises(DataError, match="the Checkpointer has no data="):
        list(loop.data)
    with pytest.raises(TypeError):
        len(loop.data)
    assert not loop.data.is_at_end


@pytest.mark.parametrize("name", loaders())
def test_plain_samplers_are_computed_and_others_are_skipped_through(name: str) -> None:
    loader = loaders()[name]
    sampler = make_sampler(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler, 5)
    others = {"with replacement", "weighted", "subset", "set_epoch", "own batch sampler", "list sampler"}
    assert type(sampler) is (Skipping if name in others else PlainSampler)


class Billion(Dataset[int]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def test_the_last_batch_of_a_billion_is_there_at_once() -> None:
    """Without a list of a billion numbers, and without walking through them."""
    source = LoaderSource(DataLoader(Billion(), batch_size=64, shuffle=True), 5)
    assert source.left(Cursor()) == 15_625_000
    end = Cursor(2, 15_624_999, 10**9 - 64)
    (last,), (again,) = plain(source.open(end)), plain(source.open(end))
    assert len(set(last)) == 64 and last == again


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4), (1, 23), (5, 1), (4, 30)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_another_batch_size_goes_on_with_the_next_sample(sizes: tuple[int, int], shuffle: bool) -> None:
    """In the middle of an epoch: every sample still comes once, in the same order."""
    first, second = (LoaderSource(DataLoader(Counted(), batch_size=size, shuffle=shuffle), 5) for size in sizes)
    whole = [item for batch in plain(first.open(Cursor(3))) for item in batch]
    assert sorted(whole) == list(range(N))
    for batches in range(1, -(-N // sizes[0]) + 1):
        at = further(first, batches, 3)
        rest = plain(second.open(at))
        assert [item for batch in rest for item in batch] == whole[at.samples :]
        assert all(len(batch) == sizes[1] for batch in rest[:-1])


def opened(loader: Any) -> Batches:
    loop = Noting(make_source(loader, 5))
    return loop.data


def test_a_position_comes_back_as_it_was_saved() -> None:
    for name, loader in loaders().items():
        data = opened(loader)
        for _ in zip(range(3), data, strict=False):
            pass
        saved = data.saved(data.at)
        assert opened(loaders()[name]).read(saved) == data.at, name
        assert opened(loaders()[name]).drift(saved) == "", name


def test_a_position_in_batches_is_understood() -> None:
    """Of a checkpoint made before samples were counted: it is told that the order was another one."""
    data = opened(DataLoader(Counted(), batch_size=4, shuffle=True))
    assert data.read({"epoch": 1, "consumed": 3}) == Cursor(1, 3, 12)
    assert data.read({"epoch": 1, "consumed": 6}) == Cursor(1, 6, N)
    assert data.drift({"epoch": 1, "consumed": 3}).startswith("the samples were in the order None")
    assert data.drift({"epoch": 1, "consumed": 0}) == ""


@pytest.mark.parametrize("before", ["in order", "shuffled", "subset", "own batch sampler"])
@pytest.mark.parametrize("now", ["in order", "shuffled", "subset", "own batch sampler"])
def test_another_order_is_noticed(before: str, now: str) -> None:
    first, second = opened(loaders()[before]), opened(loaders()[now])
    next(iter(first))
    ours = {"in order": "sequential", "shuffled": "feistel6/1"}
    assert bool(second.drift(first.saved(first.at))) == (ours.get(before) != ours.get(now))


def test_what_workers_read_ahead_does_not_count() -> None:
    """A slow loop: the position after each batch is the same, with everything prefetched and with nothing."""
    positions = []
    for workers in (0, 1, 4):
        options = {"num_workers": workers, "prefetch_factor": 16} if workers else {}
        data = opened(DataLoader(Counted(), batch_size=4, shuffle=True, **options))  # type: ignore[arg-type]
        positions.append([data.saved(data.at) for _ in data])
    assert positions[0] == positions[1] == positions[2] and len(positions[0]) == 6


@pytest.mark.parametrize("before", loaders())
@pytest.mark.parametrize("now", ["in order", "shuffled", "subset", "own batch sampler"])
def test_the_end_of_an_epoch_is_the_end_whatever_the_order_is_now(before: str, now: str) -> None:
    first, second = opened(loaders()[before]), opened(loaders()[now])
    for _ in first:
        pass
    saved = first.saved(first.at)
    assert saved["data"]["ended"] and second.drift(saved) == ""
    second.seek(second.read(saved))
    assert second.start(1) == Cursor(1) or now not in ("in order", "shuffled")
    assert list(second) == [] or now not in ("in order", "shuffled"), "where positions are samples"


def test_the_end_of_an_epoch_is_the_end_whatever_its_length_is_now() -> None:
    data = opened(DataLoader(Counted(), batch_size=4, shuffle=True))
    list(data)
    saved = data.saved(data.at)
    longer = opened(DataLoader(range(N + 9), batch_size=4, shuffle=True))  # type: ignore[arg-type]
    assert longer.drift(saved) == ""
    longer.seek(longer.read(saved))
    assert longer.is_at_end and list(longer) == []


# -- several iterators over one loader --------------------------------------------------------------------------------


def rows(loader: Any) -> list[int]:
    return sorted(int(row) for batch in loader for row in batch)


def test_two_iterators_have_a_place_each() -> None:
    loader = OurLoader(Counted(), batch_size=4, shuffle=True, tail="partial")
    pairs = list(zip(loader, loader, strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    assert sorted(int(row) for one, _ in pairs for row in one) == list(range(N))
    assert rows(loader) == list(range(N)), "the next epoch is whole"


def test_who_stops_after_all_batches_finds_the_next_epoch() -> None:
    loader = OurLoader(Counted(), batch_size=4, shuffle=True, tail="partial")
    epochs = [list(itertools.islice(loader, len(loader))) for _ in range(3)]
    assert [rows(epoch) for epoch in epochs] == [list(range(N))] * 3
    assert loader.state_dict()["epoch"] == 2


def test_an_older_iterator_does_not_move_the_loader() -> None:
    loader = OurLoader(Counted(), batch_size=4)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    at = loader.state_dict()
    next(older)
    assert loader.state_dict() == at


def test_what_was_left_of_an_epoch_comes_first() -> None:
    loader = OurLoader(Counted(), batch_size=4, tail="partial")
    first = list(itertools.islice(loader, 2))
    assert rows(first) + rows(loader) == list(range(N))


def test_a_state_at_the_end_of_an_epoch_yields_nothing_first() -> None:
    loader = OurLoader(Counted(), batch_size=4, tail="partial")
    list(itertools.islice(loader, len(loader)))
    again = OurLoader(Counted(), batch_size=4, tail="partial")
    again.load_state_dict(loader.state_dict())
    assert list(again) == []
    assert rows(again) == list(range(N))
