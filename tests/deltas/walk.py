"""A run with chains in this process: what the state was after each step, and what a machine that dies leaves of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch

import stepwell
from tests.loop.small import Small

State = dict[str, torch.Tensor]
SECONDS = 60.0


def chained(where: Path, **options: Any) -> Small:
    """Bases only when they are asked for; one table for all parameters, which are few."""
    usual = {"deltas": stepwell.Deltas(small="pool"), "policy": stepwell.Never()}
    return Small(where, {**usual, **options})


def state_of(run: Small) -> State:
    """Model and optimizer, copied."""
    found = {f"model/{name}": value.clone() for name, value in run.model.state_dict().items()}
    for index, entry in run.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{index}/{name}": value.clone() for name, value in entry.items()}
    return found


def train(run: Small, steps: int, *, until: int = 10**9) -> dict[int, State]:
    """So many more steps, each in a record or a checkpoint before the next. The state after each."""
    truth: dict[int, State] = {}
    for epoch in run.ckpt.epochs(1000):
        for batch in run.ckpt.data:
            if truth or run.ckpt.status().step:
                settle(run)
            if len(truth) == steps:
                return truth
            run.seen.append((epoch, [int(value) for value in batch[:, 0]]))
            run.update(batch)
            truth[run.ckpt.status().step + 1] = state_of(run)
    return truth


def settle(run: Small) -> None:
    """Wait until the step is durable, in a record or as a base, if there is a base at all."""
    deadline = time.monotonic() + SECONDS
    while True:
        status = run.ckpt.status()
        reached = max(status.delta_step or 0, status.committed_step or 0)
        if reached >= status.step or status.committed_step is None:
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.001)


def crashed(run: Small, to: Path) -> Path:
    """What is on disk now, in another place: no agent and no memory belong to it."""
    shutil.copytree(run.where, to)
    return to


def distance(found: State, truth: State, start: State) -> float:
    """Of the parameters, relative to the way from the start."""

    def between(left: State, right: State) -> float:
        names = [name for name in left if name.startswith("model/") and name.endswith(("weight", "bias"))]
        return sum(float((left[name].double() - right[name].double()).square().sum()) for name in names) ** 0.5

    return between(found, truth) / between(truth, start)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
