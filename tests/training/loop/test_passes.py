"""More than one pass over the data in an epoch, and passes that the run does not know of."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell import DataError, Every
from tests.training.loop.small import Small


def trained(where: Path, *, stop_after: int | None = None, second: str = "none") -> tuple[Small, int]:
    """Three epochs of six batches, each with a second pass over the data. Returns how many batches were trained on."""
    run, done = Small(where, {"policy": Every(steps=1)}), 0
    with run.ckpt:
        run.ckpt.restore()
        for _ in run.ckpt.epochs(3):
            for batch in run.ckpt.data:
                run.update(batch)
                done += 1
                if done == stop_after:
                    return run, done
            for batch in {"none": [], "same": run.ckpt.data, "loader": run.loader}[second]:
                with torch.no_grad():
                    run.model(batch)
    return run, done


def test_a_second_pass_in_an_epoch_is_refused(run_dir: Path) -> None:
    """It was taken for the next epoch: a restart lost whole epochs, and orders repeated without one."""
    with pytest.raises(DataError, match=r"epoch 0 of ckpt.epochs\(\) is over.*use another loader.*for more"):
        trained(run_dir, second="same")
    run, _ = trained(run_dir, second="loader")
    assert run.ckpt.status().step == 18, "and nothing of the first epoch is lost"


def test_a_second_pass_is_refused_after_a_restart_at_the_last_batch(run_dir: Path) -> None:
    trained(run_dir, stop_after=6)
    with pytest.raises(DataError, match="epoch 0 of"):
        trained(run_dir, second="same")


@pytest.mark.parametrize("stop_after", [5, 6, 7])
def test_a_pass_over_the_loader_itself_moves_nothing(stop_after: int, run_dir: Path, tmp_path: Path) -> None:
    whole, count = trained(tmp_path / "whole", second="loader")
    _, before = trained(run_dir, stop_after=stop_after, second="loader")
    again, after = trained(run_dir, second="loader")
    assert before + after == count == 18
    assert all(map(torch.equal, again.parameters(), whole.parameters()))


@pytest.mark.parametrize("place", ["before", "inside"])
def test_one_batch_that_is_an_epoch_may_be_looked_at(place: str, run_dir: Path) -> None:
    run = Small(run_dir, {"data": [torch.ones(4, 8)]})
    run.ckpt.restore()
    if place == "before":
        next(iter(run.ckpt.data))
    for epoch in run.ckpt.epochs(3):
        if place == "inside":
            next(iter(run.ckpt.data))
        for batch in run.ckpt.data:
            run.seen.append((epoch, []))
            run.update(batch)
    assert [epoch for epoch, _ in run.seen] == [0, 1, 2]


def test_without_epochs_each_pass_is_an_epoch(run_dir: Path) -> None:
    run = Small(run_dir)
    orders: list[Any] = []
    for _ in range(3):
        orders.append([int(row) for batch in run.ckpt.data for row in batch[:, 0]])
    assert len({tuple(order) for order in orders}) == 3
    run.ckpt.close(save=False)


@pytest.mark.parametrize("wants_epochs", [False, True])
@pytest.mark.parametrize(("stop_after", "epoch"), [(4, 0), (8, 1), (15, 2)])
def test_a_restart_of_a_loop_that_counts_its_epochs_itself_is_warned(
    stop_after: int, epoch: int, wants_epochs: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`range(3)` begins at 0 again: the restart trained as many epochs too many, without a word."""

    def train(stop_after: int = 0) -> None:
        run, done = Small(run_dir), 0
        with run.ckpt:
            run.ckpt.restore()
            next(iter(run.ckpt.data))  # only looked at
            for _ in run.ckpt.epochs(3) if wants_epochs else range(3):
                for batch in run.ckpt.data:
                    run.update(batch)
                    done += 1
                    if done == stop_after:
                        return

    train(stop_after)
    assert not [line for line in caplog.messages if "ckpt.epochs(n)" in line]
    train()
    found = [line for line in caplog.messages if "ckpt.epochs(n)" in line]
    assert len(found) == (epoch > 0 and not wants_epochs)
    assert all(f"continues in epoch {epoch}, but" in line and f"trains {epoch} epoch" in line for line in found)


@pytest.mark.parametrize("is_counted_on", [False, True])
@pytest.mark.parametrize("stop_after", [2, 3, 4, 6])
def test_a_part_of_each_epoch_is_counted_from_the_index(
    stop_after: int, is_counted_on: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`islice` counts anew after a restart: it took more of that epoch than without one, and nothing said so."""

    def train(stop_after: int = 0) -> list[tuple[int, list[int]]]:
        run = Small(run_dir)
        with run.ckpt:
            run.ckpt.restore()
            for epoch in run.ckpt.epochs(2):
                for batch in itertools.islice(run.ckpt.data, 4 - (run.ckpt.data.index if is_counted_on else 0)):
                    run.seen.append((epoch, [int(value) for value in batch[:, 0]]))
                    run.update(batch)
                    if len(run.seen) == stop_after:
                        return run.seen
        return run.seen

    seen = train(stop_after) + train()
    assert len(seen) == (8 if is_counted_on else 10)
    found = [line for line in caplog.messages if "started its count again in epoch" in line]
    assert len(found) == (not is_counted_on)


def past(run: Small, *, step: str = "none", epochs: int = 1) -> None:
    """Train on the loader itself, past `ckpt.data`."""
    run.ckpt.restore()
    for _ in run.ckpt.epochs(epochs):
        for batch in run.loader:
            run.update(batch)
            if step != "none":
                run.ckpt.step(**{"batches": 0} if step == "zero" else {})


def test_steps_past_the_data_that_was_given_are_refused(run_dir: Path) -> None:
    """Nothing told where in the epoch they were: a restart repeated its batches, and there was nothing to skip by."""
    run = Small(run_dir)
    with pytest.raises(DataError, match=r"no batch came from ckpt.data.*Iterate ckpt.data instead.*step\(batches=0\)"):
        past(run, step="plain")
    run.ckpt.close(save=False)
    run = Small(run_dir)
    past(run, step="zero")
    assert run.ckpt.status().step == 6, "whoever says so trains on something else"


def test_a_loop_past_the_data_without_step_is_named(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    run = Small(run_dir)
    past(run)
    assert [line for line in caplog.messages if "no batch came from ckpt.data" in line] == [
        "Counted 6 optimizer steps as one (step 1): data= was given, but no batch came from ckpt.data, so a restart "
        "begins the epoch again. Iterate ckpt.data instead of the loader"
    ]


@pytest.mark.parametrize(("data", "fix"), [(True, "Iterate `ckpt.data` instead"), (False, "Call `ckpt.step")])
def test_the_warning_of_a_loop_without_a_trigger_names_the_right_fix(data: bool, fix: str, run_dir: Path) -> None:
    run = Small(run_dir, {} if data else {"data": None})
    run.ckpt.restore()
    with pytest.warns(UserWarning, match=f"21 optimizer steps without a trigger.*{fix}"):
        for batch in [torch.ones(4, 8)] * 21:
            run.update(batch)
    run.ckpt.close(save=False)
