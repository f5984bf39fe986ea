"""A loader that knows nothing of the other ranks is said once; one that does is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import stepwell
from stepwell.events.data_events import SameSamples
from stepwell.events.run_events import Event
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.source_choice import make_source
from stepwell.types import Owner

DATA = TensorDataset(torch.arange(24))


def said(loader: Any, rank: int, world_size: int) -> list[Event]:
    found: list[Event] = []
    make_source(loader, 7, emit=found.append, owner=Owner(rank, world_size))
    return found


def test_a_shuffled_loader_without_a_sampler_of_ranks_is_said_once_and_by_rank_0() -> None:
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    assert said(loader, 0, 4) == [SameSamples(ranks=4)]
    assert said(loader, 1, 4) == [] == said(loader, 0, 1)
    assert "Each of the 4 ranks trains on the same samples" in SameSamples(ranks=4).text()
    assert said(DataLoader(DATA, batch_size=None, shuffle=True), 0, 2) == [SameSamples(ranks=2)]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)),
        stepwell.DataLoader(DATA, 4, shuffle=True),
        DataLoader(DATA, batch_size=4),  # an evaluation, or ranks of one replica
        [1, 2, 3],
    ],
)
def test_what_may_know_of_ranks_is_not_said(loader: Any) -> None:
    assert said(loader, 0, 2) == []


def test_what_is_said_is_so() -> None:
    """Control: without a sampler of ranks all get the same samples; with the run's ranks each gets its own."""

    def samples(loader: Any) -> list[list[int]]:
        sources = [make_source(loader, 7, owner=Owner(rank, 2)) for rank in range(2)]
        return [[int(index) for (batch,) in source.open(Cursor()) for index in batch] for source in sources]

    first, second = samples(DataLoader(DATA, batch_size=4, shuffle=True))
    assert first == second
    first, second = samples(stepwell.DataLoader(DATA, 4, shuffle=True))
    assert sorted(first + second) == list(range(24))
