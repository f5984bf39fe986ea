"""Which batches a step used, where gradients are cleared, absent, or belong to an earlier batch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import stepwell
from stepwell import DataError, Every, Never
from tests.training.loop.small import Numbers, Small, same


class Scaled(Small):
    """Mixed precision: the first scales are too large, so the first steps are left out and their gradients cleared."""

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-3)
        self.options = {**self.options, "track": {"scaler": self.scaler}}
        super().__post_init__()

    def update(self, batch: torch.Tensor) -> None:
        self.scaler.scale(1e3 * self.model(batch / 24).pow(2).mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def test_steps_that_a_scaler_leaves_out_are_no_reading_ahead(run_dir: Path, tmp_path: Path) -> None:
    whole = Scaled(tmp_path / "whole")
    whole.ckpt.restore()
    whole.train()
    skipped = len(whole.seen) - whole.ckpt.status().step
    assert skipped > 1
    for stop_after in (1, 3, 7):
        run = Scaled(run_dir)
        run.ckpt.restore()
        run.train(stop_after=stop_after)
        run.ckpt.close()
    run = Scaled(run_dir)
    run.ckpt.restore()
    run.train()
    assert same(run.parameters(), whole.parameters())


class Ends(torch.nn.Module):
    """The first and the last layer have no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.used, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(8, 1), torch.nn.Linear(2, 2)


def accumulate(where: Path, stop_after: int | None = None) -> tuple[list[torch.Tensor], int]:
    """Two epochs of six batches, with a step after each fourth. Returns the model, and how many steps there were."""
    torch.manual_seed(0)
    model = Ends()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    with stepwell.Checkpointer(where, policy=Never(), seed=7, data=loader, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        done = ckpt.data.index
        for batch in (batch for _ in ckpt.epochs(2) for batch in ckpt.data):
            model.used(batch / 24).pow(2).mean().backward()
            done += 1
            if done % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if done == stop_after:
                break
    return [value.clone() for value in model.state_dict().values()], ckpt.status().step


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_gradients_that_wait_are_found_wherever_they_are(stop_after: int, run_dir: Path, tmp_path: Path) -> None:
    whole, steps = accumulate(tmp_path / "whole")
    accumulate(run_dir, stop_after)
    again = accumulate(run_dir)
    assert again[1] == steps == 3
    assert same(again[0], whole)


@pytest.mark.parametrize("told", [False, True])
def test_a_batch_that_is_read_between_backward_and_step_is_not_of_that_step(told: bool, run_dir: Path) -> None:
    """It looks like the second batch of an accumulation, but nothing was done with it."""
    run = Small(run_dir, {"policy": Every(steps=1)})
    run.ckpt.restore()
    batches = iter(run.ckpt.data)
    batch = next(batches)
    for number in range(4):
        run.model(batch / 24).pow(2).mean().backward()
        refusal = pytest.raises(DataError, match=r"step\(batches=n\)") if number and not told else nullcontext()
        with refusal:
            batch = next(batches)
        if number and not told:
            break
        run.optimizer.step()
        run.optimizer.zero_grad()
        if told:
            run.ckpt.step(batches=1)
            assert run.ckpt.save().wait(60)
            assert run.ckpt.data.usage.at.batches == number + 1
    run.ckpt.close(save=told)


def test_a_script_that_reads_ahead_since_the_restart_is_warned(run_dir: Path) -> None:
    for is_ahead in (False, True):
        run = Small(run_dir, {"policy": Never()})
        run.ckpt.restore()
        batches = iter(run.ckpt.data)
        batch = next(batches)
        for _ in range(2):
            following = next(batches) if is_ahead else None
            run.update(batch)
            batch = next(batches) if following is None else following
        run.ckpt.close()
        assert [event["batches"] for event in run.events("skipped")] == [1] * is_ahead
