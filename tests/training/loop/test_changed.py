"""What a loop changes after it was left, or after a save, is told from what an object only makes anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stepwell
from stepwell import Every, Never
from tests.training.loop.small import Small, same


def count_epochs(where: Path, *, stop_after: int | None = None) -> int:
    """Two epochs of six batches, which the code after the inner loop counts. Returns the count in the end."""
    run = Small(where)
    run.ckpt.close(save=False)
    generator, counts = torch.Generator(), {"epochs": 0}
    tracked: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "draws": generator, "counts": counts}
    with stepwell.Checkpointer(where, policy=Never(), data=run.loader, **tracked) as ckpt:
        ckpt.restore()
        done = 0
        for _ in ckpt.epochs(2):
            for batch in ckpt.data:
                run.update(batch)
                done += 1
                if done == stop_after:
                    break
            if done == stop_after:
                in_the_way = [generator.get_state() for _ in range(5)]
                break
            counts["epochs"] += 1
    assert stop_after is None or in_the_way
    return counts["epochs"]


def test_leaving_both_loops_after_the_last_batch_leaves_the_code_behind_it_to_the_restart(run_dir: Path) -> None:
    """A tracked generator tells of a new tensor each time: that is no sign that this code has run."""
    assert count_epochs(run_dir, stop_after=6) == 0
    assert count_epochs(run_dir) == 2


def test_an_array_that_changes_after_a_save_between_epochs_is_saved_again(run_dir: Path) -> None:
    run = Small(run_dir)
    run.ckpt.close(save=False)
    losses = {"losses": numpy.zeros(3)}
    ckpt = stepwell.Checkpointer(
        run_dir, model=run.model, optimizer=run.optimizer, losses=losses, data=run.loader, policy=Every(epochs=9)
    )
    ckpt.restore()
    for epoch in ckpt.epochs(3):
        if epoch == 1:
            break
        for batch in ckpt.data:
            run.update(batch)
        ckpt.save()
        losses["losses"][epoch] = 1.0
    ckpt.close()  # all events are written then
    assert [event["changed"] for event in run.events("saved-again")] == [["losses"]]


class Scheduled(Small):
    """A schedule that steps in the loop body, and a counter there."""

    def __post_init__(self) -> None:
        self.used = {"batches": 0}
        self.options = {"policy": Never(), "used": self.used, **self.options}
        super().__post_init__()
        self.ckpt.close(save=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        options = {"data": self.loader, "seed": 7, "scheduler": self.scheduler, **self.options}
        self.ckpt = stepwell.Checkpointer(self.where, model=self.model, optimizer=self.optimizer, **options)

    def run(self, *, save_at: tuple[int, ...] = (), stop_after: int = 99, last: bool = False) -> None:
        """Two epochs. Each save comes after the optimizer's step, and before the rest of the body, unless `last`."""
        self.ckpt.restore()
        own = self.ckpt.data.is_counted_only
        for epoch in self.ckpt.epochs(2):
            batches = [torch.full((4, 8), 1.0 + epoch)] * 6
            for number, batch in enumerate(batches if own else self.ckpt.data, 0 if own else self.ckpt.data.index):
                if own and number < self.ckpt.data.index:
                    continue
                self.update(batch)
                at = 6 * epoch + number
                if at in save_at and not last:
                    self.ckpt.save().wait(60)
                self.scheduler.step()
                self.used["batches"] += 1
                if own:
                    self.ckpt.step()
                if at in save_at and last:
                    self.ckpt.save().wait(60)
                if at == stop_after:
                    self.ckpt.wait(60)
                    self.ckpt.close(save=False)
                    return


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("save_at", [(2,), (5,), (2, 3, 8)])
def test_what_the_loop_body_does_after_its_save_is_saved_too(
    save_at: tuple[int, ...], own: bool, run_dir: Path, tmp_path: Path
) -> None:
    """The schedule's step came after the save: a restart went on without it, and without a word."""
    options = {"data": None} if own else {}
    whole = Scheduled(tmp_path / "whole", options)
    whole.run()
    run = Scheduled(run_dir, options)
    run.run(save_at=save_at, stop_after=save_at[-1] + 1)
    said = [event["changed"] for event in run.events("saved-again") if event["where"] == "in the loop body"]
    assert said == [["optimizer", "scheduler", "used"]], "once"
    again = Scheduled(run_dir, options)
    again.run()
    assert again.used == whole.used == {"batches": 12}
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    assert same(again.parameters(), whole.parameters())


def test_a_save_at_the_end_of_the_loop_body_is_taken_once(run_dir: Path) -> None:
    run = Scheduled(run_dir, {"keep": 9})
    run.run(save_at=(2, 3, 5), stop_after=6, last=True)
    assert not run.events("saved-again")
    assert [event["step"] for event in run.events("commit")] == [3, 4, 6]
