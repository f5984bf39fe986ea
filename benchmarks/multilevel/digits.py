"""One rank of a job that loses nodes: a small convolutional net on real handwritten digits, one checkpoint an epoch.

    torchrun ... digits.py EPOCHS PACE        LAUNCH_FOLDER, LAUNCH_NAME as in tests/launch

With STEPWELL_CACHE: stepwell with levels, caches that are lost with their node. Without: rank 0 saves everything with
torch.save, the others wait, and all load it at a start.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import result  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import stepwell
from tests.launch.train import FOLDER, note

IS_CACHED = "STEPWELL_CACHE" in os.environ
HELD_OUT, BATCH = 297, 64
"""Pictures for the accuracy, of 1797; and of one step, all ranks together."""
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's, without loading scikit-learn: that would be a part of each restart."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None, "pip install scikit-learn"
    table = numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype="float32")
    return torch.from_numpy(table[:, :-1]).reshape(-1, 1, 8, 8) / 16, torch.from_numpy(table[:, -1]).long()


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def make_net() -> nn.Sequential:
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4, 10))
    return nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2d(2), block(32, 64), *flat)


def all_reduce_mean(values: list[torch.Tensor]) -> None:
    """In place, in one message and one order: equal bits after every restart."""
    together = torch.cat([value.flatten() for value in values]) / dist.get_world_size()
    dist.all_reduce(together)
    offset = 0
    for value in values:
        value.copy_(together[offset : offset + value.numel()].reshape(value.shape))
        offset += value.numel()


class Root:
    """The baseline. It knows epochs only: what was done of one is lost."""

    def __init__(self, tracked: dict[str, Any], data: torch.utils.data.TensorDataset) -> None:
        self._tracked, self._data, self.step, self.lineage = tracked, data, 0, 0
        self._path = FOLDER / "root.pt"

    def restore(self) -> None:
        if self._path.exists():
            state = torch.load(self._path)
            self.step = state.pop("step")
            for name, value in state.items():
                self._tracked[name].load_state_dict(value)

    def epochs(self, count: int) -> Iterator[Batches]:
        rank, world = dist.get_rank(), dist.get_world_size()
        per_epoch = len(self._data) // BATCH
        for epoch in range(self.step // per_epoch, count):
            order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(epoch))
            chosen = order[: per_epoch * BATCH].reshape(per_epoch, world, -1)[:, rank]
            yield (self._data[index] for index in chosen)
            if rank == 0:
                state = {name: value.state_dict() for name, value in self._tracked.items()}
                torch.save(state | {"step": self.step}, self._path.with_suffix(".new"))
                self._path.with_suffix(".new").replace(self._path)
            dist.barrier()

    def next(self) -> None:
        self.step += 1


class Levels:
    """stepwell, with the same four calls."""

    def __init__(self, tracked: dict[str, Any], data: torch.utils.data.TensorDataset) -> None:
        loader = stepwell.DataLoader(data, BATCH // dist.get_world_size(), shuffle=True, tail="drop")
        self._ckpt = stepwell.Checkpointer(
            FOLDER / "run",
            policy=stepwell.Every(steps=len(data) // BATCH),
            levels=[stepwell.Node(), stepwell.Shared(every=10)],
            data=loader,
            seed=7,
            **tracked,
        )

    @property
    def step(self) -> int:
        return self._ckpt.status().step

    @property
    def lineage(self) -> int:
        return self._ckpt.status().lineage

    def restore(self) -> None:
        self._ckpt.restore()

    def epochs(self, count: int) -> Iterator[Batches]:
        for _ in self._ckpt.epochs(count):
            yield iter(self._ckpt.data)

    def next(self) -> None:
        """The loop's next request for a batch counts the step."""


def main() -> None:
    epochs, pace = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    rank, (pictures, labels) = dist.get_rank(), load_digits()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    tracked = {"model": net, "optimizer": optimizer}
    torch.manual_seed(100 + rank)  # dropout
    data = torch.utils.data.TensorDataset(pictures[HELD_OUT:], labels[HELD_OUT:])
    way: Root | Levels = Levels(tracked, data) if IS_CACHED else Root(tracked, data)
    way.restore()
    note(begin=way.step, rank=rank, lineage=way.lineage)
    for batches in way.epochs(epochs):
        for inputs, wanted in batches:
            loss = functional.cross_entropy(net(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().reshape(1)
            all_reduce_mean([mean, *(parameter.grad for parameter in net.parameters())])
            optimizer.step()
            way.next()
            note(step=way.step + IS_CACHED, rank=rank, loss=mean.item())
            time.sleep(pace)
        if rank == 0:
            net.eval()
            with torch.no_grad():
                right = (net(pictures[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).float().mean().item()
            net.train()
            note(epoch=way.step, accuracy=right)
    note(end=way.step, rank=rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
