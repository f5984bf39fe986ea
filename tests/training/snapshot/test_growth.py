"""A state that grows has checkpoints too, however fast it grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import Every
from stepwell.events.journal import read_events


class Replay:
    """A replay buffer: larger at each step, by this factor."""

    def __init__(self, factor: float, floats: int) -> None:
        self._factor, self.items = factor, torch.zeros(floats)

    def grow(self) -> None:
        self.items = torch.zeros(int(self._factor * len(self.items)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.items = state["items"]


def train(where: Path, replay: Replay, steps: int) -> list[dict[str, object]]:
    """No step begins before the memory that the one before asked for is there, and its copy over. Returns the events.

    A step that is skipped because the previous copy still runs says nothing about memory.
    """
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    ckpt = stepwell.Checkpointer(where, policy=Every(steps=1), layer=layer, optimizer=optimizer, replay=replay)
    for _ in range(steps):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        replay.grow()
        ckpt.step()
        ckpt._snapshotter.pool.wait_prepared()
        ckpt._snapshotter.drain()
    ckpt.close(save=False)
    return list(read_events(where / "events.jsonl"))


@pytest.mark.parametrize("factor", [1.05, 1.25])
def test_slots_grow_ahead_of_the_state(factor: float, run_dir: Path) -> None:
    found = train(run_dir, Replay(factor, 1 << 15), steps=12)
    assert len([event for event in found if event["kind"] == "commit"]) >= 3
    assert len([event for event in found if event["kind"] == "arena"]) <= 8


def test_one_that_outgrows_everything_is_waited_for(run_dir: Path) -> None:
    """No slack is enough, as with `host_memory=` that has room for none."""
    found = train(run_dir, Replay(2.5, 1 << 12), steps=7)
    taken = [event["step"] for event in found if event["kind"] == "commit"]
    told = [event["step"] for event in found if event["kind"] == "outgrown"]
    assert told and set(told) <= set(taken)
    assert len([event for event in found if event["kind"] == "arena"]) <= 8
