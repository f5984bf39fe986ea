"""Epochs through many restarts: every one whole, whatever its tail, and what depends on the step goes on as it was."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stepwell
from stepwell.training.data.batches import Batches
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.source_choice import make_source
from stepwell.training.state.flatten import flatten
from tests.training.loop.small import Small, same
from tests.training.loop.test_position import Numbers, Training

COUNT = 22


def ours(size: int, count: int = COUNT, **options: Any) -> stepwell.DataLoader:
    return stepwell.DataLoader(Numbers(count), size, True, **options)


def order(epochs: int, count: int = COUNT) -> list[int]:
    """The samples of these epochs, one after the other, in the order of the run's seed (7)."""
    source = make_source(ours(count, count, tail="drop"), 7)
    return [int(value) for epoch in range(epochs) for batch in source.open(Cursor(epoch)) for value in batch[:, 0]]


@pytest.mark.parametrize("chance", range(3))
def test_carry_through_restarts_is_one_stream(chance: int, run_dir: Path) -> None:
    """Batches of another size and other workers with every restart; left at any batch, also at the edge."""
    dice, stream, is_over, starts = random.Random(chance), [], False, 0
    while not is_over:
        loader = ours(dice.choice([3, 4, 5, 9]), num_workers=dice.choice([0, 0, 1]) if starts < 6 else 0)
        seen, is_over = Training(run_dir, loader).run(dice.randint(1, 4), 4)
        stream += [sample for _, sample in seen]
        starts += 1
    assert starts > 4
    assert stream == order(5)[: len(stream)] and len(stream) >= 4 * COUNT


@pytest.mark.parametrize("size", [4, 30])
def test_carry_without_epochs_goes_on_too(size: int, run_dir: Path) -> None:
    """A loop that goes round and round; batches may be larger than an epoch."""
    stream: list[int] = []
    for rounds in (1, 2, 1, 3):
        training = Training(run_dir, ours(size))
        training.ckpt.restore()
        for _ in range(rounds):
            for batch in training.ckpt.data:
                stream += [int(value) for value in batch[:, 0]]
                training.update(batch)
        training.ckpt.close()
    assert len(stream) >= 4 * COUNT and stream == order(9)[: len(stream)]


def test_carry_and_a_save_between_epochs(run_dir: Path) -> None:
    """The code after the last batch is done: the next epoch begins after what was carried over."""
    first = Training(run_dir, ours(4))
    first.ckpt.restore()
    stream = []
    for epoch in first.ckpt.epochs(3):
        for batch in first.ckpt.data:
            stream += [int(value) for value in batch[:, 0]]
            first.update(batch)
        if epoch == 1:
            first.ckpt.save().wait(30)
            first.ckpt.close(save=False)
            break
    second = Training(run_dir, ours(4))
    seen, _ = second.run(10**6, 3)
    assert {epoch for epoch, _ in seen} == {2}
    stream += [sample for _, sample in seen]
    assert stream == order(4)[: len(stream)] and len(stream) >= 3 * COUNT


def test_carry_and_more_epochs_after_the_end(run_dir: Path) -> None:
    seen, is_over = Training(run_dir, ours(4)).run(10**6, 2)
    more, _ = Training(run_dir, ours(4)).run(10**6, 4)
    assert is_over
    stream = [sample for _, sample in seen + more]
    assert stream == order(5)[: len(stream)] and len(stream) >= 4 * COUNT


@pytest.mark.parametrize("tail", ["drop", "partial", "carry"])
@pytest.mark.parametrize("stops", [(1, 1, 1), (2, 3), (5, 1), (6, 2), (11, 1)])
def test_again_and_again_in_one_epoch_and_at_its_edge(tail: str, stops: tuple[int, ...], run_dir: Path) -> None:
    """A second and third resume in one epoch, at the last batch but one, exactly at the edge, right after it."""
    seen: list[tuple[int, int]] = []
    for steps in (*stops, 10**6):
        more, _ = Training(run_dir, ours(4, tail=tail)).run(steps, 3)
        seen += more
    straight, _ = Training(run_dir.with_name("straight"), ours(4, tail=tail)).run(10**6, 3)
    assert seen == straight
    if tail != "carry":
        times = Counter(epoch for epoch, _ in seen)
        assert times == dict.fromkeys(range(3), 20 if tail == "drop" else COUNT), "each epoch is whole"
        assert set(Counter(seen).values()) == {1}


# -- what goes by steps -----------------------------------------------------------------------------------------------


class Scheduled:
    """A run with a learning rate that changes with every step, and half-way through an epoch by half."""

    def __init__(self, where: Path) -> None:
        self.small = Small(where, {"policy": stepwell.Never()})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.small.optimizer, lambda step: 0.9**step)
        options = {"policy": stepwell.Never(), "seed": 7, "model": self.small.model, "optimizer": self.small.optimizer}
        self.ckpt = stepwell.Checkpointer(where, data=self.small.loader, scheduler=self.scheduler, **options)

    def run(self, steps: int) -> list[float]:
        self.ckpt.restore()
        rates = []
        for _ in self.ckpt.epochs(3):
            for batch in self.ckpt.data:
                rates.append(self.scheduler.get_last_lr()[0])
                self.small.update(batch)
                self.scheduler.step()
                if len(rates) == steps:
                    self.ckpt.close()
                    return rates
        return rates


@pytest.mark.parametrize("stops", [(1,), (4,), (6,), (2, 2, 3), (5, 1, 1)])
def test_the_learning_rate_goes_on_as_it_was(stops: tuple[int, ...], run_dir: Path) -> None:
    straight = Scheduled(run_dir / "straight")
    expected = straight.run(10**6)
    assert expected == [0.01 * 0.9**step for step in range(18)]
    rates: list[float] = []
    for steps in (*stops, 10**6):
        last = Scheduled(run_dir / "often")
        rates += last.run(steps)
    assert rates == expected
    assert same(straight.small.parameters(), last.small.parameters())


# -- what a position costs --------------------------------------------------------------------------------------------


class Endless(Dataset[int]):
    """Ten thousand million samples; notes which are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


@pytest.mark.parametrize("tail", ["carry", "drop", "partial", "pad", "torch"])
def test_a_late_position_reads_nothing_before_it(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Endless()
    plain = DataLoader(data, batch_size=64, shuffle=True)
    source = make_source(plain if tail == "torch" else stepwell.DataLoader(data, 64, True, tail=tail), 7)
    computed: list[int] = []
    inner = stepwell.training.data.permutation.Permutation.at

    def counting(self: Any, positions: torch.Tensor) -> torch.Tensor:
        computed.extend(positions.tolist())
        return inner(self, positions)

    monkeypatch.setattr(stepwell.training.data.permutation.Permutation, "at", counting)
    batch = next(source.open(Cursor(3, 10**9 // 64, 10**9)))
    assert data.read == batch.tolist() and len(data.read) == 64
    assert min(computed) == 10**9 and len(computed) == 64


def test_a_position_is_smaller_than_a_kilobyte() -> None:
    data = Batches([])
    data.attach(make_source(stepwell.DataLoader(Endless(), 64, True), 7))
    saved = data.saved(Cursor(90, 10**8, 10**10 - 1))
    assert len(json.dumps(flatten(saved).tree)) < 1024
