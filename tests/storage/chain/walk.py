"""A run with chains in this process: what the state was after each step, and what a machine that dies leaves of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import stepwell
from stepwell.types import CheckpointId
from tests.levels.peer_node import until
from tests.training.loop.small import Numbers, Small

State = dict[str, torch.Tensor]
SECONDS = 60.0


class Wide(Small):
    """Enough parameters that a record is small beside a base."""

    device = "cpu"
    is_woven = False
    """Its largest matrix lies column by column, under a fused optimizer."""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 128), torch.nn.Linear(128, 1)
        ).to(self.device)
        if self.is_woven:
            self.model[2].weight = torch.nn.Parameter(self.model[2].weight.detach().t().contiguous().t())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=self.is_woven)
        self.numbers = Numbers()
        self.loader = DataLoader(self.numbers, batch_size=4, shuffle=True)
        self.ckpt = stepwell.Checkpointer(
            self.where, model=self.model, optimizer=self.optimizer, data=self.loader, seed=7, **self.options
        )
        self.seen = []


class Woven(Wide):
    is_woven = True


def chained(where: Path, kind: type[Wide] = Wide, **options: Any) -> Wide:
    """Bases only when the chain asks for them."""
    usual = {"deltas": stepwell.Deltas(small="pool"), "policy": stepwell.Never()}
    return kind(where, {**usual, **options})


def state_of(run: Small) -> State:
    """Model and optimizer, copied."""
    found = {f"model/{name}": value.clone() for name, value in run.model.state_dict().items()}
    for index, entry in run.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{index}/{name}": value.clone() for name, value in entry.items()}
    return found


def train(
    run: Small, steps: int, at: Callable[[int], None] = lambda step: None, *, is_chained: bool = False
) -> dict[int, State]:
    """So many steps, each durable before the next; the first one is a base. Returns the state after each.

    at:          called after each step, when it is
    is_chained:  there is a chain already, and no step is before a base
    """
    truth: dict[int, State] = {}
    first = -1 if is_chained else run.ckpt.status().committed_step
    for epoch in run.ckpt.epochs(1000):
        for batch in run.ckpt.data:
            if truth:
                settle(run, first)
                at(max(truth))
            if len(truth) == steps:
                return truth
            run.seen.append((epoch, [int(value) for value in batch[:, 0]]))
            run.update(batch)
            truth[run.ckpt.status().step + 1] = state_of(run)
            if len(truth) == 1 and run.ckpt.status().delta_step is None:
                # A chain asks for its base by itself, some steps later: `test_kills` has that.
                run.ckpt.save().upload_completion.result(SECONDS)
    return truth


def train_into_another_chain(run: Small, *, is_told: bool = True) -> None:
    """Until one whose base is of later steps than now has a record.

    More than one base may be there by now: a chain asks for one by itself, beside the one that `train` saves.

    is_told:  the agent says that the old one has ended
    """
    now = run.ckpt.status().step
    deadline = time.monotonic() + SECONDS
    while (is_told and not run.events("chain-ended")) or not any(
        base_step(event) > now for event in run.events("delta")
    ):
        assert time.monotonic() < deadline, run.ckpt.status()
        train(run, 2)
        time.sleep(0.02)


def base_step(event: dict[str, Any]) -> int:
    """Of the chain that a record went to."""
    base = CheckpointId.parse(event["base"])
    assert base is not None
    return base.step


def settle(run: Small, first: int | None) -> None:
    """Wait until the step is in a record or a base, or is left out because a base holds the slots.

    first:  the checkpoint that was there before this process
    """
    deadline = time.monotonic() + SECONDS
    while True:
        status = run.ckpt.status()
        reached = max(status.delta_step or 0, status.committed_step or 0)
        if reached >= status.step or status.committed_step == first:
            return
        # Or a base was due instead, and had no slot either.
        skipped = run.events("delta-skipped") + run.events("snapshot-skipped")
        if any(event["step"] == status.step for event in skipped):
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.002)


def crashed(run: Small, to: Path) -> Path:
    """What is on disk now, in another place: no agent and no memory belong to it. The agent stands still meanwhile."""
    agent = run.ckpt.status().agent_pid
    os.kill(agent, signal.SIGSTOP)
    try:
        until(lambda: "T" in Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0])
        return Path(shutil.copytree(run.where, to))
    finally:
        os.kill(agent, signal.SIGCONT)


def distance(found: State, truth: State, start: State) -> float:
    """Of the parameters, relative to the way from the start."""

    def between(left: State, right: State) -> float:
        names = [name for name in left if name.startswith("model/") and name.endswith(("weight", "bias"))]
        return sum(float((left[name].double() - right[name].double()).square().sum()) for name in names) ** 0.5

    return between(found, truth) / between(truth, start)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
