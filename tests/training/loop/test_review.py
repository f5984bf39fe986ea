"""Mistakes a reviewer once found, each kept out by the test that showed it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import ConfigError, DataError, Every, Keep, Never
from stepwell.handover.protocol import NoPart
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.training.loop.small import Small, same
from tests.training.snapshot.truth import Case, run


def test_one_row_of_a_frozen_leaf_changes(run_dir: Path) -> None:
    """An ordinary assignment that misses every sampled element is seen by the version."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(200, 64).requires_grad_(False)
    head = torch.nn.Linear(64, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        head(table(torch.arange(8))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            with torch.no_grad():
                table.weight[3, 1:9] = 7.0

    outcome = run(Case({"table": table, "head": head, "optimizer": optimizer}, body), run_dir, steps=8)
    assert outcome.wrong() == []
    assert len(outcome.found) == 4


def test_save_as_the_last_line_of_an_epoch_body(run_dir: Path) -> None:
    """The code after the loop is done when the user saves there: a resume must not do it again."""

    def train(stop_in: int | None) -> list[float]:
        small = Small(run_dir)
        scheduler = torch.optim.lr_scheduler.StepLR(small.optimizer, 1, gamma=0.5)
        small.ckpt = stepwell.Checkpointer(
            run_dir,
            model=small.model,
            optimizer=small.optimizer,
            scheduler=scheduler,
            data=small.loader,
            seed=7,
            policy=Never(),
        )
        small.ckpt.restore()
        rates = []
        for epoch in small.ckpt.epochs(3):
            for batch in small.ckpt.data:
                small.update(batch)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            small.ckpt.save().wait()
            if epoch == stop_in:
                small.ckpt.close(save=False)
                break
        return rates

    assert train(1) + train(None) == [0.005, 0.0025, 0.00125]


def test_a_consumer_that_reads_one_batch_ahead(run_dir: Path) -> None:
    """With `step()` the cursor counts what the loop used, not what it was given."""

    def train(stop_after: int | None) -> list[list[int]]:
        small = Small(run_dir, {"policy": Never()})
        small.ckpt.restore()
        used: list[list[int]] = []
        batches = iter(small.ckpt.data)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            small.update(batch)
            used.append([int(value) for value in batch[:, 0]])
            small.ckpt.step(batches=1)
            if len(used) == stop_after:
                break
        small.ckpt.close()
        return used

    first = train(3)
    assert sorted(i for batch in first + train(None) for i in batch) == list(range(24))


def test_a_later_lineage_wins_over_an_earlier_repeat(run_dir: Path) -> None:
    first = Small(run_dir, {"policy": Never(), "keep": Keep(last=9)})
    first.ckpt.restore()
    for batch in itertools.islice(first.ckpt.data, 2):
        first.update(batch)
    first.ckpt.save()
    first.ckpt.save().wait()
    first.ckpt.close()
    second = Small(run_dir, {"policy": Never(), "keep": Keep(last=9)})
    second.ckpt.restore()
    with torch.no_grad():
        second.model[0].weight.fill_(1.0)
    second.ckpt.save().wait()
    second.ckpt.close()
    third = Small(run_dir)
    third.ckpt.restore()
    third.ckpt.close(save=False)
    assert same(third.parameters(), second.parameters())
    assert scan(RunPaths(run_dir))[0].id.lineage == 2


def test_fewer_epochs_than_done_change_nothing(run_dir: Path) -> None:
    Small(run_dir).train(3)
    less = Small(run_dir)
    less.ckpt.restore()
    less.train(2)
    assert less.seen == []
    more = Small(run_dir)
    more.ckpt.restore()
    more.train(4)
    assert {epoch for epoch, _ in more.seen} == {3}


def test_a_void_last_snapshot_is_taken_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(run_dir, {"policy": Never()})
    small.ckpt.restore()
    for batch in itertools.islice(small.ckpt.data, 2):
        small.update(batch)
    verdicts = iter(["model/0.weight", None, None])
    monkeypatch.setattr("stepwell.training.snapshot.guard.Guard.changed", lambda self: next(verdicts))
    small.ckpt.close()
    assert [entry.id.step for entry in scan(RunPaths(run_dir)) if entry.is_good] == [2]


def test_optimizer_state_keeps_its_own_type(run_dir: Path) -> None:
    """Moments in float32 for parameters in bfloat16: torch's own load would cast them."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.rand(parameter.shape),
                "exp_avg_sq": torch.rand(parameter.shape),
            }
        return model, optimizer

    model, optimizer = make()
    ckpt = stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, policy=Never())
    ckpt.restore()
    ckpt.save().wait()
    ckpt.close(save=False)
    other, its = make()
    ckpt = stepwell.Checkpointer(run_dir, model=other, optimizer=its, policy=Never())
    ckpt.restore()
    ckpt.close(save=False)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[before].items():
            assert its.state[after][key].dtype == value.dtype and torch.equal(its.state[after][key], value)


def test_an_agent_that_does_not_read_does_not_stop_training(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.handover.channel._SEND_SECONDS", 0.5)
    small = Small(run_dir, {"policy": Every(steps=1)})
    small.ckpt.restore()
    small.ckpt.save().wait()
    agent = small.ckpt.status().agent_pid
    os.kill(agent, signal.SIGSTOP)
    for _ in range(400):  # thousands of bytes each: more than the socket holds
        small.update(torch.zeros(4, 8))
        small.ckpt.step(batches=0)
        small.ckpt._client.send(NoPart(0, 0, "x" * 2000))
        if small.ckpt.status().agent_pid != agent:
            break
    deadline = time.monotonic() + 60
    while small.ckpt.status().agent_pid == agent and time.monotonic() < deadline:
        small.update(torch.zeros(4, 8))
        small.ckpt.step()
    assert small.ckpt.status().agent_pid != agent
    small.ckpt.close()
    assert scan(RunPaths(run_dir))[0].id.step == small.ckpt.status().step


def test_files_are_checked_before_they_are_promised(run_dir: Path, tmp_path: Path) -> None:
    small = Small(run_dir, {"policy": Never()})
    small.ckpt.restore()
    with pytest.raises(ConfigError, match="no such file"):
        small.ckpt.save(files={"a": tmp_path / "missing"})
    with pytest.raises(ConfigError, match="plain file name"):
        small.ckpt.save(files={"../a": tmp_path})
    small.ckpt.close(save=False)


def test_a_loader_that_iterates_in_its_own_way_is_refused(run_dir: Path) -> None:
    class Doubled(torch.utils.data.DataLoader):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            return (2 * batch for batch in super().__iter__())

    model = torch.nn.Linear(1, 1)
    ckpt = stepwell.Checkpointer(run_dir, model=model, data=Doubled(torch.zeros(4, 1)))
    with pytest.raises(DataError, match="iterates in its own way"):
        ckpt.restore()
    ckpt.close()


def test_an_unexpected_error_in_an_automatic_save_does_not_stop_training(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(run_dir, {"policy": Every(steps=1)})
    small.ckpt.restore()
    small.ckpt.save().wait()
    real = small.ckpt._snapshotter._beginning._begin_copies
    failures = iter([RuntimeError("no"), RuntimeError("no"), RuntimeError("no")])

    def failing(*arguments: object) -> None:
        for failure in failures:
            raise failure
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(small.ckpt._snapshotter._beginning, "_begin_copies", failing)
    for batch in small.ckpt.data:
        small.update(batch)
        small.ckpt.wait(30)
    assert small.ckpt.save().wait(30)
    small.ckpt.close()
    assert len([event for event in small.events("snapshot-skipped") if "RuntimeError" in event["reason"]]) == 3


def test_frozen_leaves_come_with_the_next_save_when_one_could_not_begin(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their image was announced by the one that failed: later ones must not wait for it for ever."""
    small = Small(run_dir, {"policy": Never()})
    small.model.append(torch.nn.Linear(1, 40).requires_grad_(False))
    small.ckpt.restore()
    real = small.ckpt._snapshotter._beginning._begin_copies
    failures = iter([RuntimeError("no")])

    def failing(*arguments: object) -> None:
        for failure in failures:
            raise failure
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(small.ckpt._snapshotter._beginning, "_begin_copies", failing)
    with pytest.raises(RuntimeError, match="no"):
        small.ckpt.save()
    assert small.ckpt.save().wait(30)
    small.ckpt.close()
    assert list(run_dir.glob("step-*/rank-00000.frozen.safetensors"))


def test_a_checkpointer_that_was_never_opened_leaves_nothing(tmp_path: Path) -> None:
    """No hook on the optimizer, no thread: also after restore(only=), which opens nothing."""
    Small(tmp_path / "run").train()
    before = {thread.name for thread in threading.enumerate()}
    small = Small(tmp_path / "run")
    assert small.ckpt.restore(only="model")
    small.ckpt.close()
    assert {thread.name for thread in threading.enumerate()} == before
    small.model(torch.zeros(4, 8)).sum().backward()
    small.optimizer.step()
    assert not small.optimizer._optimizer_step_pre_hooks
    with pytest.raises(ConfigError, match="closed"):
        small.train()


def test_an_object_that_cannot_be_saved_does_not_stop_training(tmp_path: Path) -> None:
    """It is said when a checkpoint is due, and raised by save()."""
    small = Small(tmp_path / "run", {"policy": stepwell.Never(), "track": {"odd": {"value": object()}}})
    small.train(stop_after=3)
    with pytest.raises(stepwell.StateError, match="odd"):
        small.ckpt.save()
    small.ckpt.close(save=False)
