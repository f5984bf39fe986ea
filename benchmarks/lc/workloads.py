"""What is trained: logistic regression, LeNet-5, an AlexNet for 28 x 28 pixels, matrix factorisation.

A workload is a pure function of its seed: parameters at iteration 0, and the batch of every iteration, so that a run
that goes on from a restored state sees the batches the uninterrupted one saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from data import Images, Ratings, load_images, load_ratings
from torch import nn
from torch.nn import functional as F

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """interval: iterations between checkpoints; failures: iterations at which the whole model is lost; cap: how long
    a restored run is followed until it has the loss back; every: iterations between looks at the loss after the tenth.
    """

    name: str
    data: str
    interval: int
    failures: tuple[int, int]
    cap: int
    every: int
    make: Callable[[int], nn.Module]
    rate: float
    batch: int
    momentum: float = 0.0
    adam: bool = False


def lenet(_: int) -> nn.Module:
    """LeNet-5 with padding in the first layer, 61 706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def alexnet(_: int) -> nn.Module:
    """AlexNet's five convolutions and three layers, for 28 x 28 pixels and with an eighth to a quarter of the width."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 48, 3, padding=1), nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(432, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def logistic(_: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


class Factors(nn.Module):
    """rating ~ user . item + biases, 16 factors."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.randn(users, 17) * 0.1)
        self.item = nn.Parameter(torch.randn(items, 17) * 0.1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, v = self.user[user], self.item[item]
        return (u[:, :16] * v[:, :16]).sum(1) + u[:, 16] + v[:, 16]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("logistic/mnist", "mnist", 25, (250, 500), 150, 1, logistic, 0.01, 64),
        Kind("logistic/fashion", "fashion-mnist", 25, (250, 500), 150, 1, logistic, 0.01, 64),
        Kind("lenet/mnist", "mnist", 25, (250, 500), 100, 5, lenet, 0.02, 64),
        Kind("lenet/fashion", "fashion-mnist", 25, (250, 500), 100, 5, lenet, 0.02, 64),
        Kind("alexnet/mnist", "mnist", 25, (250, 500), 100, 5, alexnet, 0.02, 32, momentum=0.9),
        Kind("alexnet/fashion", "fashion-mnist", 25, (250, 500), 100, 5, alexnet, 0.02, 32, momentum=0.9),
        Kind("mf/movielens", "ml-100k", 10, (200, 400), 150, 1, lenet, 10.0, 4096),
        Kind("mf/jester", "jester", 10, (200, 400), 150, 1, lenet, 10.0, 4096),
        Kind("lenet-adam/fashion", "fashion-mnist", 25, (250, 500), 100, 5, lenet, 1e-3, 64, adam=True),
    )
}


class Workload:
    """One run: `step` moves it on by the batch of an iteration, `loss` is over a fixed part of the data."""

    def __init__(self, kind: Kind, folder: Path, seed: int) -> None:
        self.kind, self.seed = kind, seed
        torch.manual_seed(seed)
        self.images: Images | None = None
        if kind.name.startswith("mf/"):
            self.ratings: Ratings = load_ratings(folder / kind.data)
            self.model: nn.Module = Factors(self.ratings.users, self.ratings.items)
            self.count = len(self.ratings.rating)
        else:
            self.images = load_images(folder / kind.data)
            self.model = kind.make(seed)
            self.count = len(self.images.labels)
        fixed = np.random.default_rng(0).permutation(self.count)
        size = self.count // 5 if self.images is None else 3000 if kind.name.startswith("logistic") else 1000
        self.subset = torch.from_numpy(np.sort(fixed[:size]))
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, lr=kind.rate)
            if kind.adam
            else torch.optim.SGD(parameters, lr=kind.rate, momentum=kind.momentum)
        )

    def step(self, iteration: int) -> None:
        """Train on the batch of an iteration."""
        rng = np.random.default_rng([self.seed, iteration])
        batch = torch.from_numpy(rng.integers(0, self.count, self.kind.batch))
        self.optimizer.zero_grad()
        self._loss(batch).backward()
        self.optimizer.step()

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        if self.images is None:
            r = self.ratings
            return F.mse_loss(self.model(r.user[rows], r.item[rows]), r.rating[rows])
        return F.cross_entropy(self.model(self.images.inputs[rows]), self.images.labels[rows])

    @torch.no_grad()
    def loss(self) -> float:
        return float(self._loss(self.subset))

    def state(self) -> State:
        """Copies of the parameters."""
        return {name: value.detach().numpy().copy() for name, value in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, state: State, optimizer: dict | None = None) -> None:
        """Take over parameters; and the optimizer's own state, which the schemes leave exact, where it has one."""
        for name, value in self.model.named_parameters():
            value.copy_(torch.from_numpy(np.ascontiguousarray(state[name]).reshape(value.shape)))
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
