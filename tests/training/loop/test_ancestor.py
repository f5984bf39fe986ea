"""The defects of the ancestor (CheckFreq's released code), each kept out by a test.

Numbers as in our notes on it. Here are those of state, crash consistency and liveness that no other test names.
The rest: 3, 4 `tests/training/snapshot/test_truth.py`
- 9 `tests/hostile` - 12 `test_loop.py::test_retention` - 13 `test_restore.py` -
15 `tests/agent/test_faults.py` - 16 `tests/agent/test_replacement.py` - 18, 19 `tests/gpu` - 20 to 28 are the policy's.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell import Keep, Never
from stepwell.storage.store.catalog import read_record, scan
from stepwell.storage.store.paths import RunPaths
from stepwell.training.snapshot.host_copy import HostCopy
from tests.training.loop.small import Small, same


def trees(where: Path) -> list[dict[str, Any]]:
    paths = RunPaths(where)
    return [read_record(paths, entry.manifest).tree for entry in scan(paths) if entry.manifest is not None]


MODES: dict[str, dict[str, Any]] = {
    "overlap": {"snapshot": "overlap"},
    "blocking": {"snapshot": "blocking"},
    "streamed": {"host_memory": 4096},
}


@pytest.mark.parametrize("mode", MODES)
def test_1_2_6_every_mode_saves_every_value(mode: str, run_dir: Path) -> None:
    """Plain values (lr, betas), the data position and all generators are in the checkpoint in every mode."""
    run = Small(run_dir, {"policy": Never(), **MODES[mode]})
    run.optimizer.param_groups[0]["lr"] = 0.125
    run.ckpt.restore()
    for batch in itertools.islice(run.ckpt.data, 3):
        run.update(batch)
    run.ckpt.save().wait()
    run.ckpt.close()
    (tree,) = trees(run_dir)
    assert set(tree) == {"model", "optimizer", "stepwell"}
    own = {"step", "epoch", "consumed", "data", "finished", "stopped", "given", "rng"}
    assert own == set(tree["stepwell"])
    assert {"python", "numpy", "torch"} <= set(tree["stepwell"]["rng"])
    again = Small(run_dir)
    again.ckpt.restore()
    again.ckpt.close(save=False)
    assert again.optimizer.param_groups[0]["lr"] == 0.125
    assert again.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_5_no_checkpoint_without_position(run_dir: Path) -> None:
    run = Small(run_dir, {"keep": Keep(last=50)})
    run.ckpt.restore()
    run.train(2)
    assert all("stepwell" in tree for tree in trees(run_dir))


def test_7_learning_rate_goes_on_after_a_resume_in_mid_epoch(tmp_path: Path) -> None:
    def rates(where: Path, stop_after: int | None) -> list[float]:
        run = Small(where)
        scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
        run.ckpt = stepwell.Checkpointer(
            where,
            model=run.model,
            optimizer=run.optimizer,
            scheduler=scheduler,
            data=run.loader,
            seed=7,
            policy=Never(),
        )
        run.ckpt.restore()
        found = []
        for _ in run.ckpt.epochs(2):
            for batch in run.ckpt.data:
                found.append(run.optimizer.param_groups[0]["lr"])
                run.update(batch)
                scheduler.step()
                if len(found) == stop_after:
                    run.ckpt.close()
                    return found
        return found

    straight = rates(tmp_path / "straight", None)
    assert rates(tmp_path / "cut", 4) + rates(tmp_path / "cut", 5) + rates(tmp_path / "cut", None) == straight


@pytest.mark.parametrize("name", ["optim", "optimizer", "opt_g", "x"])
def test_8_the_step_happens_under_any_name(name: str, run_dir: Path) -> None:
    run = Small(run_dir)
    run.ckpt = stepwell.Checkpointer(
        run_dir, data=run.loader, track={"net": run.model, name: run.optimizer}, policy=Never()
    )
    before = run.parameters()
    for batch in itertools.islice(run.ckpt.data, 2):
        run.update(batch)
    run.ckpt.close(save=False)
    assert not same(before, run.parameters())


def test_10_five_restarts_never_touch_the_last_good_files(run_dir: Path) -> None:
    """Steps grow over restarts; what is committed is never opened for writing again."""
    seen: dict[str, tuple[int, int, int]] = {}
    for restart in range(5):
        run = Small(run_dir, {"policy": Never(), "keep": Keep(last=50)})
        assert run.ckpt.restore() is (restart > 0)
        assert run.ckpt.status().step == 2 * restart
        run.train(9, stop_after=2)
        run.ckpt.close()
        for path in run_dir.glob("step-*/*"):
            facts = path.stat()
            now = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
            assert seen.setdefault(str(path), now) == now
    assert [entry.id.step for entry in scan(RunPaths(run_dir))] == [10, 8, 6, 4, 2]


def test_11_stray_files_are_no_checkpoints(run_dir: Path) -> None:
    run = Small(run_dir)
    run.ckpt.restore()
    run.train(1, stop_after=2)
    run.ckpt.close()
    (run_dir / "zz_notes.txt").write_text("not a checkpoint")
    (run_dir / "step-999999999999.l0001").mkdir()
    (run_dir / "step-99").mkdir()
    (run_dir / "step-000000000099.l0001").write_text("a file")
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 2
    again.ckpt.close(save=False)


def test_14_a_copy_that_fails_does_not_stop_training(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Small(run_dir, {"policy": Never()})
    run.model.append(torch.nn.Linear(1, 4000))  # large enough to be copied by the copier thread
    run.optimizer.add_param_group({"params": run.model[3].parameters()})
    run.ckpt.restore()
    run.ckpt.save().wait()
    real = HostCopy.run

    def failing(self: HostCopy) -> None:
        if self.nbytes > 10_000:
            raise MemoryError("no memory for the copy")
        real(self)

    monkeypatch.setattr(HostCopy, "run", failing)
    batches = iter(run.ckpt.data)
    run.update(next(batches))
    handle = run.ckpt.save()
    run.update(next(batches))  # would hang at the gate
    with pytest.raises(stepwell.StateError, match="void"):
        handle.staging_completion.result(10)
    with pytest.raises(stepwell.PersistError, match="MemoryError"):
        handle.wait(10)
    monkeypatch.setattr(HostCopy, "run", real)
    run.update(next(batches))
    assert run.ckpt.save().wait(10)
    run.ckpt.close()


def test_17_nothing_has_to_be_picklable(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never()})
    run.model.callback = lambda: None
    run.optimizer.callback = lambda: None  # type: ignore[attr-defined]
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5)
    run.ckpt = stepwell.Checkpointer(run_dir, model=run.model, optimizer=run.optimizer, scheduler=scheduler)
    run.ckpt.restore()
    assert run.ckpt.save().wait()
    run.ckpt.close()


def test_29_the_end_of_an_epoch_goes_the_same_way(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": stepwell.Every(epochs=1), "keep": Keep(last=9)})
    run.ckpt.restore()
    run.ckpt.save().wait()
    run.train(2)
    assert {event["strategy"] for event in run.events("snapshot")} == {"overlap"}
    assert [entry.id.step for entry in scan(RunPaths(run_dir))] == [12, 12, 6, 0]
