"""A small training run that tests drive step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import stepwell
from stepwell.events.journal import read_events


class Numbers(Dataset[torch.Tensor]):
    """Rows that carry their own index, and a list of what was read."""

    def __init__(self, count: int = 24) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.full((8,), float(index))


@dataclass
class Small:
    """Model, optimizer, data and a Checkpointer over one directory."""

    where: Path
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.numbers = Numbers()
        self.loader = DataLoader(self.numbers, batch_size=4, shuffle=True)
        options = {"policy": stepwell.Every(steps=2), "seed": 7, "data": self.loader, **self.options}
        self.ckpt = stepwell.Checkpointer(self.where, model=self.model, optimizer=self.optimizer, **options)
        self.seen: list[tuple[int, list[int]]] = []

    def update(self, batch: torch.Tensor) -> None:
        self.model(batch / 24).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait_for_memory(self) -> None:
        """Until the next save has room. Memory is made ready from the first step on."""
        deadline = time.monotonic() + 60
        while not self.ckpt._snapshotter.pool.is_ready:
            assert time.monotonic() < deadline, "no memory for snapshots"
            time.sleep(0.001)

    def train(self, epochs: int = 2, stop_after: int | None = None) -> None:
        """Run the loop; `stop_after` leaves it by break after that many batches."""
        done = 0
        for epoch in self.ckpt.epochs(epochs):
            for batch in self.ckpt.data:
                self.seen.append((epoch, [int(value) for value in batch[:, 0]]))
                self.update(batch)
                done += 1
                if done == stop_after:
                    return

    def parameters(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.where / "events.jsonl") if event["kind"] == kind]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
