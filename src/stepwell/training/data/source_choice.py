"""Which source stands behind what the user gave as data=."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from stepwell.errors import DataError
from stepwell.events import run_events
from stepwell.events.data_events import SameSamples
from stepwell.training.data.loader import DataLoader as OurLoader
from stepwell.training.data.replayed import ReplaySource
from stepwell.training.data.sampler import epoch_seed, layers
from stepwell.training.data.source import HOW, LoaderSource, SequenceSource, Source, rebuilt
from stepwell.training.data.stateful import IterableSource, StatefulSource, has_state
from stepwell.types import Owner

_ALONE = Owner()


def make_source(
    data: Any,
    seed: int,
    *,
    on_unseekable: str = "error",
    emit: Callable[[run_events.Event], None] = lambda _: None,
    owner: Owner = _ALONE,
) -> Source:
    """The source behind data=, for this rank. Raises DataError for what cannot be resumed."""
    if isinstance(data, OurLoader):
        return data.source(seed, owner)
    is_torch = isinstance(data, DataLoader)
    if has_state(data) and hasattr(data, "__iter__"):
        return StatefulSource(data, data, getattr(data, "exactness", "order"))
    if is_torch and type(data).__iter__ is DataLoader.__iter__:
        if not isinstance(data.dataset, IterableDataset):
            if owner.rank == 0 and owner.world_size > 1 and _is_shuffled_alone(data):
                emit(SameSamples(ranks=owner.world_size))
            return LoaderSource(data, seed)
        if has_state(data.dataset) and not data.num_workers:
            return IterableSource(data, seed)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict | str):
        return SequenceSource(data)
    problem = _problem(data)
    if on_unseekable != "replay" or not _starts_anew(data):
        raise DataError(f"{problem}. {HOW}", found=type(data).__qualname__)
    return _replayed(data, seed, emit)


def initial_seed(data: Any) -> int:
    """The seed that the script gave: the loader's generator's, or else that of torch.manual_seed."""
    if isinstance(data, DataLoader):
        samplers = layers(data.sampler if data.batch_sampler is None else data.batch_sampler)
        generators = [data.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
        for generator in generators:
            if isinstance(generator, torch.Generator):
                return generator.initial_seed()
    return torch.initial_seed()


def _is_shuffled_alone(data: DataLoader[Any]) -> bool:
    """Whether it shuffles as if there were no other ranks. Other samplers may know of them."""
    given = data.sampler if data.batch_sampler is None else data.batch_sampler
    return type(layers(given)[-1]) is RandomSampler


def _problem(data: Any) -> str:
    name = type(data).__qualname__
    if isinstance(data, DataLoader):
        if type(data).__iter__ is not DataLoader.__iter__:
            return f"{name} iterates in its own way"
        kind = f"an IterableDataset ({type(data.dataset).__qualname__})"
        if has_state(data.dataset):
            return (
                f"{kind} whose copies in {data.num_workers} workers cannot report their state: use "
                "torchdata's StatefulDataLoader, or num_workers=0"
            )
        hint = "; torchdata's StatefulDataLoader asks it in each worker" if data.num_workers else ""
        return f"{kind} has no positions: give it state_dict and load_state_dict{hint}"
    if isinstance(data, Iterator):
        return f"data= is a {name}, which is exhausted after one epoch"
    return f"data= is a {name}"


def _starts_anew(data: Any) -> bool:
    return hasattr(data, "__iter__") and not isinstance(data, Iterator | dict | str)


def _replayed(data: Any, seed: int, emit: Callable[[run_events.Event], None]) -> Source:
    if not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__:
        return ReplaySource(data, emit, lambda _: None)
    generator = torch.Generator()  # the workers' seeds are those of the epoch, each time
    again = rebuilt(data, generator, batch_size=data.batch_size, drop_last=data.drop_last)
    return ReplaySource(again, emit, lambda epoch: _reseed(generator, seed, epoch))


def _reseed(generator: torch.Generator, seed: int, epoch: int) -> None:
    generator.manual_seed(epoch_seed(seed, epoch))
