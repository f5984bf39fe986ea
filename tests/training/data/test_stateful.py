"""Sources that know their own position, and sources without one: asked, given back, checked; or read again."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import stepwell
from stepwell.errors import ConfigError, DataError
from stepwell.events.journal import read_events
from stepwell.training.data.source_choice import make_source
from stepwell.training.data.stateful import alike
from tests.training.loop.test_position import Numbers, Training

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses a function that torch 2.13 calls deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader

COUNT = 22


class Stream(IterableDataset[torch.Tensor]):
    """Counts up, one epoch after the other. Counts how often it is asked."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.epoch, self.at, self.asked = count, 0, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([float(self.at - 1 + 100 * self.epoch)])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"epoch": self.epoch, "at": self.at, "more": (1, b"x", torch.tensor([self.at]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Forgetful(Stream):
    """Forgets its position within the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Particular(Stream):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Own:
    """No loader at all: batches with a state."""

    def __init__(self, data: Stream | None = None) -> None:
        self.data = data or Stream()
        self.state_dict, self.load_state_dict = self.data.state_dict, self.data.load_state_dict

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.stack([item]) for item in self.data)


def stateful(workers: int, *, shuffle: bool = True) -> Any:
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(Numbers(COUNT), 4, shuffle=shuffle, num_workers=workers, generator=generator)


SOURCES: dict[str, Any] = {
    "iterable in torch's loader": lambda: DataLoader(Stream(), batch_size=4),
    "iterable, drop last": lambda: DataLoader(Stream(), batch_size=4, drop_last=True),
    "own": Own,
    "torchdata": lambda: stateful(0),
    "torchdata, workers": lambda: stateful(2),
    "torchdata, iterable": lambda: StatefulDataLoader(Stream(), 4, num_workers=1),
}


def run(where: Path, name: str, steps: int, epochs: int = 3) -> list[tuple[int, int]]:
    return Training(where, SOURCES[name]()).run(steps, epochs)[0]


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    ("name", "stops"),
    [
        pytest.param(
            name,
            stops,
            marks=pytest.mark.soak if "torchdata" in name and (stops != (1, 2, 1) or "workers" in name) else (),
        )
        for name in SOURCES
        for stops in ((1, 2, 1), (5, 1), (6, 1))
    ],
)
def test_a_source_with_a_state_goes_on(name: str, stops: tuple[int, ...], run_dir: Path) -> None:
    """In the middle, at the last batch but one, exactly at the edge; and the next epoch is whole."""
    seen: list[tuple[int, int]] = []
    if name == "torchdata, iterable" and sum(stops) > 4:
        stops = (5, 2)  # not at the edge: see below
    for steps in (*stops, 10**6):
        seen += run(run_dir, name, steps)
    straight = run(run_dir.with_name("straight"), name, 10**6)
    same = COUNT if name.startswith("torchdata") else len(straight)  # which may shuffle later epochs differently
    assert seen[:same] == straight[:same]
    assert Counter(epoch for epoch, _ in seen) == dict.fromkeys(range(3), 20 if name.endswith("drop last") else COUNT)
    assert len(set(seen)) == len(seen)
    (promise,) = {event["data"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "start"}
    assert promise == ("exact" if name.startswith("iterable") else "order")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::Warning")
def test_torchdata_forgets_the_end_of_an_iterable_in_a_worker(run_dir: Path) -> None:
    """torchdata 0.11.0 would yield the next epoch as the rest of this one. An older checkpoint goes on."""
    Training(run_dir, SOURCES["torchdata, iterable"]()).run(4, 3)
    Training(run_dir, SOURCES["torchdata, iterable"]()).run(2, 3)
    with pytest.raises(DataError, match=r"returns another state than it was given.*restore\(before=\.\.\.\)"):
        run(run_dir, "torchdata, iterable", 1)
    training = Training(run_dir, SOURCES["torchdata, iterable"]())
    assert training.ckpt.restore(before=6) and training.ckpt.status().step == 4
    training.ckpt.close(save=False)


def test_it_is_asked_when_a_checkpoint_is_taken_and_not_before(run_dir: Path) -> None:
    data = Stream()
    training = Training(run_dir, DataLoader(data, batch_size=1))
    training.ckpt.restore()
    for number, batch in enumerate(training.ckpt.data):
        training.update(batch)
        if number == 10:
            training.ckpt.save().wait(30)
            asked = data.asked
        if number == 20:
            assert data.asked == asked <= 2, "once for the form of the state, once for the save"
    training.ckpt.close(save=False)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Forgetful, "returns another state than it was given"), (Particular, r"\(AssertionError\)")]
)
def test_a_source_that_does_not_take_its_state_is_refused(kind: type[Stream], reason: str, run_dir: Path) -> None:
    Training(run_dir, DataLoader(kind(), batch_size=4)).run(2, 3)
    with pytest.raises(DataError, match=reason):
        Training(run_dir, DataLoader(kind(), batch_size=4)).run(2, 3)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.soak  # torchdata's workers end in multiples of five seconds
def test_another_number_of_workers_is_refused_where_the_source_cannot(run_dir: Path) -> None:
    Training(run_dir, stateful(2)).run(2, 3)
    with pytest.raises(DataError, match="with the same number of workers"):
        Training(run_dir, stateful(1)).run(2, 3)


def test_another_kind_of_source_is_refused_in_the_middle(run_dir: Path) -> None:
    Training(run_dir, Own()).run(2, 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="in the order Own and are in feistel6/1 now"):
        Training(run_dir, DataLoader(Numbers(COUNT), batch_size=4, shuffle=True)).run(2, 3)


# -- a loop that reads ahead ------------------------------------------------------------------------------------------


def test_a_position_that_the_source_has_left_is_not_saved(run_dir: Path) -> None:
    """The loop holds a batch in its hands: the source would go on after it."""
    training = Training(run_dir, DataLoader(Stream(), batch_size=4))
    training.ckpt.restore()
    batches = iter(training.ckpt.data)
    held = next(batches)
    for batch in itertools.islice(batches, 3):
        training.update(held)
        training.ckpt.step(batches=1)
        held = batch
    with pytest.raises(DataError, match="Save right after a step, in a loop that does not prefetch"):
        training.ckpt.save()
    training.ckpt.close(save=False)
    assert not list(run_dir.glob("**/manifest.json"))


def test_and_training_goes_on_without(run_dir: Path) -> None:
    """A policy's save is put off with the reason; the next one that can be taken is taken."""
    training = Training(run_dir, DataLoader(Stream(), batch_size=2), policy=stepwell.Every(steps=2))
    training.ckpt.restore()
    held: torch.Tensor | None = None
    for number, batch in enumerate(training.ckpt.data):
        if held is not None:
            training.update(held)
            training.ckpt.step(batches=1)
        held = batch if number < 5 else None
        if held is None:
            training.ckpt._snapshotter.pool.wait_prepared()  # a save is put off too while memory is made ready
            training.update(batch)
            training.ckpt.step(batches=1)
    training.ckpt.close(save=False)
    found = list(read_events(run_dir / "events.jsonl"))
    skipped = [event for event in found if event["kind"] == "snapshot-skipped"]
    assert any("only the source knew" in event["reason"] for event in skipped)
    assert any(event["kind"] == "commit" for event in found)


# -- sources without a position ---------------------------------------------------------------------------------------


class Plain:
    """Any iterable: the same batches in every round. Counts what is read."""

    def __init__(self, count: int = 6) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            self.read += 1
            yield torch.tensor([[float(number)]])


class Blind(IterableDataset[torch.Tensor]):
    """A stream without a state, whose order is drawn in the worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(COUNT)[:, None].float())


def replayed(where: Path, data: Any, steps: int) -> tuple[list[tuple[int, int]], bool]:
    return Training(where, data, on_unseekable="replay").run(steps, 3)


@pytest.mark.parametrize("name", ["iterable", "loader"])
def test_replay_reads_again(name: str, run_dir: Path) -> None:
    def make() -> Any:
        return Plain() if name == "iterable" else DataLoader(Blind(), batch_size=4, num_workers=1)

    seen: list[tuple[int, int]] = []
    for steps in (2, 2, 3, 10**6):
        data = make()
        seen += replayed(run_dir, data, steps)[0]
    assert seen == replayed(run_dir.with_name("straight"), make(), 10**6)[0]
    events = list(read_events(run_dir / "events.jsonl"))
    again = [(event["epoch"], event["batches"]) for event in events if event["kind"] == "replay"]
    assert again == [(0, 2), (0, 4), (1, 1)]
    assert {event["data"] for event in events if event["kind"] == "start"} == {"replay"}
    if name == "iterable":
        assert data.read == 6 + 6


def test_a_source_that_has_become_shorter_is_refused(run_dir: Path) -> None:
    replayed(run_dir, Plain(), 5)
    shorter = Training(run_dir, Plain(3), on_unseekable="replay")
    with pytest.raises(DataError, match="ended after 3 batches, but 5 of epoch 0 were used"):
        shorter.run(1, 3)
    shorter.ckpt.close(save=False)


REFUSED = {
    "iterable": (Plain, "data= is a Plain"),
    "state in workers": (
        lambda: DataLoader(Stream(), num_workers=1),
        "torchdata's StatefulDataLoader, or num_",
    ),
    "no state": (lambda: DataLoader(Blind()), "give it state_dict and load_state_dict"),
    "no state, workers": (lambda: DataLoader(Blind(), num_workers=1), "torchdata's StatefulDataLoader asks it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_without_being_asked_to_it_refuses(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(DataError, match=f"{reason}.*on_unseekable='replay'"):
        make_source(make(), 1)


@pytest.mark.parametrize("data", [(i for i in range(3)), {1: 2}, "abc", 5], ids=lambda data: type(data).__name__)
def test_what_cannot_be_read_twice_is_refused_all_the_same(data: Any) -> None:
    with pytest.raises(DataError, match=type(data).__name__):
        make_source(data, 1, on_unseekable="replay")


def test_the_option_is_checked(run_dir: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="on_unseekable='ignore': give one of error, replay"):
        stepwell.Checkpointer(run_dir, model=model, on_unseekable="ignore")


def test_alike() -> None:
    state = {"a": [1, (2.0, None)], "b": torch.arange(3), "c": {"d": b"x", "e": float("nan")}}
    assert alike(state, {"a": [1, [2.0, None]], "b": torch.arange(3), "c": {"d": b"x", "e": float("nan")}})
    for change in ({"a": [1]}, {"b": torch.arange(4)}, {"b": torch.arange(3.0)}, {"c": {"d": b"y"}}, {"f": 1}):
        assert not alike(state, {**state, **change})
    assert alike(random.getstate(), random.getstate())
