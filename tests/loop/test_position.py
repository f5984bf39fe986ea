"""Where in the data a restart goes on: at the next sample, whatever the size of the batches, and never by guessing."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stepwell
from stepwell.errors import DataError
from stepwell.journal import read_events


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Training:
    """A loop that is left by break, over and over, each time with another loader."""

    def __init__(self, where: Path, loader: DataLoader[torch.Tensor], *, strict: bool = True) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.ckpt = stepwell.Checkpointer(
            where, policy=stepwell.Never(), seed=7, data=loader, model=self.model, optimizer=self.optimizer
        )
        self.strict = strict

    def run(self, steps: int, epochs: int) -> tuple[list[tuple[int, int]], bool]:
        """What was trained on, as (epoch, sample), and whether the end was reached. Closing saves the last step."""
        self.ckpt.restore(strict=self.strict)
        seen = []
        for epoch in self.ckpt.epochs(epochs):
            for batch in self.ckpt.data:
                seen += [(epoch, int(value)) for value in batch[:, 0]]
                self.model(batch).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                steps -= 1
                if not steps:
                    self.ckpt.close()
                    return seen, False
        return seen, True


@pytest.mark.parametrize("chance", range(4))
def test_batch_size_and_workers_change_with_every_restart(chance: int, run_dir: Path) -> None:
    """Over three epochs each sample comes once in each, in the order of the run that was never stopped."""
    dice, count = random.Random(chance), 97
    whole, _ = Training(run_dir / "whole", DataLoader(Numbers(count), batch_size=5, shuffle=True)).run(10**6, 3)
    seen: list[tuple[int, int]] = []
    is_over, starts = False, 0
    while not is_over:
        starts += 1
        loader = DataLoader(
            Numbers(count),
            batch_size=dice.choice([1, 3, 8, 20]),
            shuffle=True,
            num_workers=dice.choice([0, 0, 0, 2]) if starts < 5 else 0,
        )
        more, is_over = Training(run_dir / "often", loader).run(dice.randint(1, 9), 3)
        seen += more
    assert starts > 3
    assert seen == whole
    assert set(Counter(seen).values()) == {1} and len(seen) == 3 * count


def test_another_number_of_samples_is_refused_in_the_middle_of_an_epoch(run_dir: Path) -> None:
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(2, 3)
    with pytest.raises(DataError, match="had 20 samples and has 21 now, in the middle of epoch 0"):
        Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True)).run(1, 3)
    told = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True), strict=False)
    seen, _ = told.run(100, 1)
    assert len(seen) == 13
    problems = [event["problems"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "mismatch"]
    assert problems == [["the data set had 20 samples and has 21 now, in the middle of epoch 0"]]


def test_another_number_of_samples_is_fine_between_epochs(run_dir: Path) -> None:
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(100, 1)
    seen, _ = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True)).run(100, 2)
    assert sorted(seen) == [(1, index) for index in range(21)]
