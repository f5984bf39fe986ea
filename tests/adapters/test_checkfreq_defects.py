"""The defects found in CheckFreq's released code, numbered as in docs/checkfreq.md, as they would show here.

Those that the core makes impossible, whatever the interface, have the core's test in the table of that page.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stepwell
from stepwell import faults
from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode
from stepwell.events.journal import read_events
from tests.adapters.small import Small, same
from tests.crash.harness import wait_for

MANUAL = CFMode.MANUAL


def beside(where: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds beside the tracked objects."""
    values: dict[str, Any] = {}
    with stepwell.Checkpointer(where, policy=stepwell.Never(), checkfreq=values) as reader:
        assert reader.restore(step=step, only="checkfreq")
    return values


def reopened(where: Path, **options: Any) -> Small:
    return Small(where, mode=MANUAL, seed=9, restore="before", **options)


# -- data loss, wrong state -------------------------------------------------------------------------------------------


def test_defect_01_a_checkpoint_of_save_cpu_restores_with_every_plain_value(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL)
    small.train(batches=3)
    small.optimizer.param_groups[0]["lr"] = 0.123
    small.manager.save_cpu(synchronous=True)
    small.manager.close()
    again = reopened(run_dir)
    assert again.optimizer.state_dict()["param_groups"] == small.optimizer.state_dict()["param_groups"]
    assert again.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    again.manager.close()


@pytest.mark.parametrize("call", ["save", "save_cpu"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_defect_02_every_way_to_save_keeps_map_and_position(run_dir: Path, call: str, synchronous: bool) -> None:
    small = Small(run_dir, mode=MANUAL)
    small.train(batches=2)
    getattr(small.manager, call)(additional_snapshot={"mine": 1}, synchronous=synchronous)
    small.manager.close()
    found = beside(run_dir, 2)
    assert found["given"] == {"mine": 1}
    assert (found["position"]["epoch"], found["position"]["iter"]) == (0, 2)


def test_defect_03_tensors_on_the_cpu_are_copied_before_they_change(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL)
    small.train(batches=2)
    weights = small.weights()
    moments = small.optimizer.state_dict()["state"][0]["step"].clone()
    small.manager.save_cpu()
    small.update(torch.ones(4, 8))
    small.manager.close()
    again = reopened(run_dir)
    assert same(again.weights(), weights)
    assert torch.equal(again.optimizer.state_dict()["state"][0]["step"], moments)
    again.manager.close()


def test_defect_04_what_the_forward_pass_writes_is_of_the_trigger(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_slow_copy", 0.05)
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=1)
    small.train(batches=1)
    small.manager.save(synchronous=True)  # memory is ready from here on
    small.train(batches=1)
    weights = small.weights()
    batch = next(small.iterator)  # the trigger of step 2: from here on the state is being copied
    for _ in range(5):
        small.model(batch)  # BatchNorm's statistics change
    assert not same(small.weights(), weights)
    small.manager.checkpointer().wait(60)
    small.manager.close()
    again = reopened(run_dir)
    assert same(again.weights(), weights)
    again.manager.close()


def test_defect_05_no_checkpoint_is_without_position(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=1, overwrite=False)
    small.train(epochs=2)
    small.manager.close()
    steps = small.steps_on_disk()
    assert 6 in steps and 12 in steps
    for step in steps:
        position = beside(run_dir, step)["position"]
        assert position["steps_so_far"] == step
        assert position["epoch"] * 6 + position["iter"] == step


def test_defect_06_generators_schedule_and_seed_come_back(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL, chk_freq=3)
    small.train(batches=3)
    small.iterator.__next__()
    drawn = random.random(), float(numpy.random.rand()), torch.rand(2)
    rate = small.scheduler.get_last_lr()
    seed = small.manager.seed
    small.manager.close()
    again = reopened(run_dir)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # what a script may do before its loop
    iter(again.iterator).__next__()
    assert (random.random(), float(numpy.random.rand())) == drawn[:2] and torch.equal(torch.rand(2), drawn[2])
    assert again.scheduler.get_last_lr() == rate and again.manager.seed == seed
    again.manager.close()


def test_defect_07_the_place_in_the_epoch_and_its_length_survive(run_dir: Path) -> None:
    """The original's script computes the learning rate from the loop's own index and from what is left of the epoch."""
    small = Small(run_dir, mode=MANUAL, chk_freq=4)
    small.train(batches=5)
    small.manager.close()
    again = reopened(run_dir)
    assert len(again.iterator) == 6 and again.iterator._size == 24
    next(iter(again.iterator))
    assert again.iterator.state_dict() == {"iter": 5, "steps_so_far": 5, "start_index": 20, "epoch": 0}
    again.manager.close()


@pytest.mark.parametrize("name", ["optim", "optimizer", "opt_g"])
def test_defect_08_weight_update_steps_whatever_the_name_is(run_dir: Path, name: str) -> None:
    small = Small(run_dir, mode=MANUAL, optimizer_name=name)
    before = small.weights()
    small.train(batches=1)
    assert not same(small.weights(), before)
    assert small.optimizer.state_dict()["state"][0]["step"] == 1
    small.manager.close()


def test_defect_08_weight_update_without_one_optimizer_is_an_error(run_dir: Path) -> None:
    model = torch.nn.Linear(2, 2)
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters())
    none = CFManager(str(run_dir), CFCheckpoint(model=model), mode=MANUAL)
    with pytest.raises(stepwell.ConfigError, match=r"0 are tracked \(none\)"):
        none.weight_update()
    two = CFManager(str(run_dir), CFCheckpoint(model=model, a=adam, b=sgd), mode=MANUAL)
    with pytest.raises(stepwell.ConfigError, match=r"2 are tracked \(a, b\)"):
        two.weight_update()


# -- crash consistency ------------------------------------------------------------------------------------------------


def test_defect_09_a_torn_newest_checkpoint_gives_way_to_the_older(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL, chk_freq=2)
    small.train(batches=5)
    small.manager.close()
    newest = small.entries()[-1]
    shard = newest.path / "rank-00000.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    again = reopened(run_dir)
    assert newest.id.step == 4 and again.restored == {"iter": 2, "steps_so_far": 2, "start_index": 8, "epoch": 0}
    again.manager.close()


def test_defect_10_numbers_go_on_after_restarts(run_dir: Path) -> None:
    options: dict[str, Any] = {"mode": MANUAL, "chk_freq": 1, "overwrite": False}
    small = Small(run_dir, **options)
    small.train(batches=3)
    small.manager.close()
    for restart in range(3):
        kept = {entry.path: entry.path.stat().st_mtime_ns for entry in small.entries()}
        small = Small(run_dir, **options, restore="before", seed=restart)
        assert small.restored is not None and small.restored["steps_so_far"] == max(small.steps_on_disk())
        small.train(batches=3)
        small.manager.close()
        assert {path: path.stat().st_mtime_ns for path in kept} == kept, "no older checkpoint is written to"
    assert small.steps_on_disk() == list(range(1, max(small.steps_on_disk()) + 1))


def test_defect_11_a_stray_file_is_no_checkpoint(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL, chk_freq=2)
    small.train(batches=3)
    small.manager.close()
    (run_dir / "zz_notes.txt").write_text("not a checkpoint")
    (run_dir / "step-zz").mkdir()
    again = reopened(run_dir)
    assert again.restored is not None and again.restored["iter"] == 2
    again.manager.close()
    assert (run_dir / "zz_notes.txt").read_text() == "not a checkpoint"


def test_defect_12_epoch_checkpoints_stay_and_can_be_asked_for(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL, chk_freq=2)
    ends = []
    for epoch in range(1, 5):
        small.train(epochs=epoch)
        ends.append(small.weights())
    small.train(batches=5)
    small.manager.close()
    assert small.steps_on_disk() == [6, 12, 18, 24, 26, 28]
    again = Small(run_dir, mode=MANUAL, seed=9)
    assert again.manager.restore(latest=False, epoch=2) == {
        "iter": 6,
        "steps_so_far": 12,
        "start_index": 24,
        "epoch": 1,
    }
    assert same(again.weights(), ends[1])
    again.train(batches=1)  # nothing is left of epoch 1: this is the first of the third
    assert again.seen[0] == small.seen[12]
    again.manager.close()


def test_defect_12_without_keep_epoch_chk_they_go(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL, keep_epoch_chk=False)
    small.train(epochs=4)
    small.manager.close()
    assert small.steps_on_disk() == [18, 24]
    unknown = Small(run_dir, mode=MANUAL)
    with pytest.raises(stepwell.RestoreError, match="end of epoch 9; there are: 1, 2, 3, 4"):
        unknown.manager.restore(latest=False, epoch=9)


def test_defect_13_what_does_not_fit_is_refused_before_anything_changes(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL)
    small.train(batches=1)
    small.manager.save(synchronous=True)
    small.manager.close()
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))
    before = [value.clone() for value in other.state_dict().values()]
    manager = CFManager(str(run_dir), CFCheckpoint(model=other), mode=MANUAL)
    with pytest.raises(stepwell.StateError, match="does not fit the tracked objects"):
        manager.restore()
    assert same(list(other.state_dict().values()), before)
    manager.close()


# -- liveness ---------------------------------------------------------------------------------------------------------


def test_defect_14_16_a_killed_writer_is_noticed_and_training_goes_on(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=1)
    small.train(batches=2)
    os.kill(small.manager.checkpointer().status().agent_pid, signal.SIGKILL)
    small.train(batches=6)  # weight_update() returns
    small.manager.save(synchronous=True)
    small.manager.close()
    assert max(small.steps_on_disk()) == 8
    assert "agent-death" in {event["kind"] for event in read_events(run_dir / "events.jsonl")}


def test_defect_15_a_failed_write_is_said_and_the_next_one_works(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "agent!fsync:EIO:1,fsync:EIO:2,fsync:EIO:3,fsync:EIO:4,fsync:EIO:5")
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=1)
    small.train(batches=5)
    small.manager.save()
    wait_for(lambda: small.steps_on_disk(), "a checkpoint after the failures")
    small.manager.close()
    assert any(event["kind"] == "persist-failed" for event in read_events(run_dir / "events.jsonl"))


def test_defect_16_profiling_a_snapshot_leaves_nothing_set(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL)
    small.train(batches=1)
    seconds, zero = small.manager.save(profile_snap=True)
    assert seconds > 0 and zero == 0
    small.train(batches=1)
    small.manager.save(profile_full=True)
    assert max(small.steps_on_disk()) == 2
    small.manager.close()


def test_defect_17_nothing_of_the_tracked_objects_is_pickled(run_dir: Path) -> None:
    small = Small(run_dir, mode=MANUAL)  # its LambdaLR holds a lambda
    small.model.register_forward_hook(lambda *_: None)
    small.train(batches=1)
    small.manager.save(use_thread=False, synchronous=True)
    small.manager.save_cpu(use_thread=False, synchronous=True)
    small.manager.close()
    assert small.steps_on_disk() == [1]


# -- policy -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no automatic frequency")
def test_defect_25_27_28_short_epochs_any_folder_and_no_cache_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No call without a profile in a short epoch, no mount path asked for, nothing written to the working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    small = Small(run_dir, mode=CFMode.AUTO)
    small.train(epochs=2)
    small.manager.close()
    assert {6, 12} <= set(small.steps_on_disk())
    assert list(work.iterdir()) == []


def test_a_checkpoint_that_fails_does_not_stop_the_iterator(run_dir: Path) -> None:
    class Moody:
        value: object = 1

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model, moody = torch.nn.Linear(8, 1), Moody()
    chk = CFCheckpoint(model=model, optimizer=torch.optim.Adam(model.parameters()), moody=moody)
    manager = CFManager(str(run_dir), chk, mode=MANUAL)
    iterator = CFIterator([torch.ones(4, 8)] * 5, chk_freq=1, cf_manager=manager)
    with pytest.warns(UserWarning, match=r"no checkpoint at step 3: moody/value.*Training continues"):
        for number, batch in enumerate(iterator, 1):
            model(batch).sum().backward()
            manager.weight_update()
            moody.value = object() if number == 3 else number
    assert iterator.state_dict()["epoch"] == 1
    manager.close()
    assert sorted(path.name[:17] for path in run_dir.glob("step-*")) == ["step-000000000004", "step-000000000005"]
