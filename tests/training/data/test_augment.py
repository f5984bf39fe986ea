"""Randomness by sample: the same bytes whoever reads it, whatever else was read before; and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler, get_worker_info

import stepwell
from stepwell.training.data.augment import Keyed, Ticket, seed_generators
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.source import LoaderSource
from tests.ranks.conftest import soak

N = 23
Draws = dict[int, tuple[float, ...]]


class Drawing(Dataset[torch.Tensor]):
    """Each sample: its index and a draw from each of the three generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class AtOnce(Drawing):
    """Fetches a batch in one call, and draws for it as a whole."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self[index] for index in indices]


def mixed(items: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws, as mixup does."""
    return torch.stack([*items, torch.full((4,), torch.rand(()).item() + random.random(), dtype=torch.float64)])


def source(seed: int = 5, keyed: bool | None = None, data: Any = None, **options: Any) -> LoaderSource:
    options = {"batch_size": 4, "shuffle": True, **options}
    return LoaderSource(DataLoader(data or Drawing(), **options), seed, keyed=keyed)


def stream(made: LoaderSource, epoch: int = 0, skip: int = 0) -> list[list[list[float]]]:
    at = Cursor(epoch)
    for _ in range(skip):
        at = made.after(at)
    return [batch.tolist() for batch in made.open(at)]


def by_sample(batches: list[list[list[float]]]) -> Draws:
    return {int(row[0]): tuple(row[1:]) for batch in batches for row in batch}


@pytest.fixture(scope="module")
def expected() -> list[Draws]:
    """Of epochs 0 and 1, read by two workers."""
    made = source(num_workers=2)
    return [by_sample(stream(made, epoch)) for epoch in (0, 1)]


def test_samples_and_epochs_draw_differently(expected: list[Draws]) -> None:
    draws = [value for epoch in expected for row in epoch.values() for value in row]
    assert len(set(draws)) == len(draws) == 2 * N * 3
    assert by_sample(stream(source(6, num_workers=1))) != expected[0], "another seed"


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 3, "batch_size": 5},
        {"num_workers": 2, "prefetch_factor": 7, "persistent_workers": True},
        {"num_workers": 1, "shuffle": False},
        {"num_workers": 1, "batch_size": None},
        {"num_workers": 0, "keyed": True},
        {"num_workers": 0, "keyed": True, "batch_size": 7},
        {"num_workers": 0, "keyed": True, "batch_size": None},
    ],
    ids=str,
)
def test_it_does_not_matter_how_a_sample_is_read(options: dict[str, Any], expected: list[Draws]) -> None:
    made = source(**options)
    for epoch in (0, 1, 0):
        batches = stream(made, epoch)
        rows = [batches] if options.get("batch_size", 4) is None else batches
        assert by_sample(rows) == expected[epoch]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["spawn", soak("forkserver")])
def test_nor_how_workers_are_started(method: str, expected: list[Draws]) -> None:
    made = source(num_workers=1, multiprocessing_context=method, persistent_workers=True)
    assert by_sample(stream(made, 1)) == expected[1]
    assert by_sample(stream(made, 0)) == expected[0], "the same workers, told the epoch with each batch"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("skip", [0, 1, 4])
def test_a_resume_draws_the_same(workers: int, skip: int, expected: list[Draws]) -> None:
    rest = by_sample(stream(source(num_workers=workers), 1, skip))
    assert rest == {index: expected[1][index] for index in rest} and len(rest) == N - 4 * skip


def test_control_unkeyed_it_does_matter() -> None:
    whole = by_sample(stream(source(num_workers=1, keyed=False)))
    assert by_sample(stream(source(num_workers=2, keyed=False))) != whole
    rest = by_sample(stream(source(num_workers=1, keyed=False), 0, 2))
    assert rest != {index: whole[index] for index in rest}


@pytest.mark.parametrize("data", [Drawing, AtOnce])
def test_draws_of_the_batch_as_a_whole_belong_to_it(data: type[Drawing]) -> None:
    """In `collate_fn`, and in a data set that fetches whole batches."""
    streams = [
        stream(source(data=data(), num_workers=workers, keyed=True, collate_fn=mixed), 2) for workers in (0, 1, 2)
    ]
    assert streams[0] == streams[1] == streams[2]
    assert len({batch[-1][0] for batch in streams[0]}) == len(streams[0])
    assert stream(source(data=data(), num_workers=1, collate_fn=mixed), 2, 3) == streams[0][3:]


@pytest.mark.parametrize("batched", [True, False])
def test_a_sample_that_comes_twice_draws_twice(batched: bool) -> None:
    """Oversampled: copies that are all alike would be no augmentation. Its place makes the key."""
    data = Drawing()
    sampler = WeightedRandomSampler([1.0] * 3 + [0.0] * (N - 3), 30)
    options = {"batch_size": 4 if batched else None, "num_workers": 1}
    made = LoaderSource(DataLoader(data, sampler=sampler, **options), 5)  # type: ignore[arg-type]
    found = stream(made)
    rows = [row for batch in found for row in batch] if batched else found
    assert len({row[1] for row in rows}) == 30  # type: ignore[index]
    assert stream(made, 0, 3) == found[3:]


def test_a_batch_sampler_of_the_user_s() -> None:
    made = LoaderSource(
        DataLoader(Drawing(), batch_sampler=BatchSampler(RandomSampler(range(9)), 4, False), num_workers=1), 5
    )
    assert stream(made, 0, 1) == stream(made)[1:]


# -- the trainer's generators are left alone --------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["carry", "partial"])
def test_keyed_without_workers_leaves_the_trainer_s_generators_as_they_are(tail: str) -> None:
    loader = stepwell.DataLoader(Drawing(), 4, True, keyed=True, tail=tail, collate_fn=mixed)
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    expected = [(torch.rand(1), numpy.random.rand(), random.random()) for _ in range(6)]
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    found = [(torch.rand(1), numpy.random.rand(), random.random()) for _ in loader]
    assert found == expected, "a model that draws between batches"


def test_without_workers_a_plain_loader_draws_from_the_trainer_s_generators() -> None:
    """They come back exactly on a resume: nothing is keyed unasked."""
    torch.manual_seed(1)
    first = stream(source())
    torch.manual_seed(2)
    assert stream(source()) != first


# -- the data set behind it -------------------------------------------------------------------------------------------


class Opened(Dataset[str]):
    """Opens its file in the worker."""

    path = "a path"
    file: str | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return f"{self.file}:{index}"


def open_in_worker(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.file = info.dataset.path + " opened"


def test_worker_init_fn_reaches_the_data_set() -> None:
    loader = DataLoader(Opened(), batch_size=2, num_workers=1, worker_init_fn=open_in_worker)
    batches = list(LoaderSource(loader, 5).open(Cursor()))
    assert batches == [["a path opened:0", "a path opened:1"], ["a path opened:2", "a path opened:3"]]


def test_the_wrapper_is_its_data_set_in_all_but_name() -> None:
    data = Opened()
    keyed = Keyed(data, 5)
    assert len(keyed) == 4 and keyed.path == "a path" and not hasattr(keyed, "nothing")
    keyed.file = "f"
    assert data.file == "f" and keyed[Ticket(1, 0)] == "f:1"


def test_keys_are_not_added_up() -> None:
    """With `seed + epoch + index` sample 1 of epoch 0 draws what sample 0 draws in epoch 1."""
    drawn = set()
    for secret in (b"0", b"1"):
        for epoch in range(12):
            for key in Ticket(list(range(12)), epoch).each():
                seed_generators(secret, key)
                drawn.add((torch.rand(()).item(), numpy.random.rand(), random.random()))
    assert len(drawn) == 2 * 12 * 12


def test_the_seeds_never_change() -> None:
    """If this fails, a resumed run would augment differently under this version: the keys need another name."""
    seen = []

    class Seeds(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append((torch.initial_seed(), int(numpy.random.get_state()[1][0]), random.random()))
            return torch.tensor(index)

    list(source(7, data=Seeds(), keyed=True, shuffle=False).open(Cursor(3)))
    assert seen[4] == GOLDEN


GOLDEN = (2978779740, 564315701, 0.5366807758142382)
