"""An optimizer of another kind, or with other groups, is refused before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import StateError
from tests.training.loop.small import Small, same


def trained(run_dir: Path, make: Any) -> None:
    small = Small(run_dir)
    small.ckpt.close()
    small = Small(run_dir)
    small.optimizer = make(small.model)
    start(small, run_dir)
    small.train(epochs=1)


def start(small: Small, run_dir: Path) -> None:
    import stepwell

    small.ckpt = stepwell.Checkpointer(
        run_dir, model=small.model, optimizer=small.optimizer, data=small.loader, seed=7, policy=stepwell.Every(steps=2)
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def split(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "what"),
    [(adam, "saved by another kind of optimizer"), (split, "1 parameter group of 6 parameters in the checkpoint, 2")],
)
def test_it_is_refused_and_nothing_has_changed(make: Any, what: str, run_dir: Path) -> None:
    trained(run_dir, sgd)
    small = Small(run_dir, seed=5)
    small.optimizer = make(small.model)
    start(small, run_dir)
    before, groups = small.parameters(), [dict(group) for group in small.optimizer.param_groups]
    with pytest.raises(StateError, match=what):
        small.ckpt.restore()
    assert same(small.parameters(), before) and not small.optimizer.state
    assert [{**group, "params": 0} for group in small.optimizer.param_groups] == [{**g, "params": 0} for g in groups]


def test_what_fits_comes_back_if_that_is_asked_for(run_dir: Path) -> None:
    trained(run_dir, sgd)
    small = Small(run_dir, seed=5)
    small.optimizer = adam(small.model)
    start(small, run_dir)
    before = small.parameters()
    assert small.ckpt.restore(strict=False)
    assert not same(small.parameters(), before) and not small.optimizer.state
    small.train(epochs=2)


def test_a_schedule_and_another_version_of_torch_are_no_other_kind(run_dir: Path) -> None:
    def scheduled(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return optimizer

    trained(run_dir, scheduled)
    small = Small(run_dir, seed=5)
    small.optimizer = sgd(small.model)
    small.optimizer.param_groups[0]["of_a_later_torch"] = None
    start(small, run_dir)
    assert small.ckpt.restore()
    small.ckpt.close()
