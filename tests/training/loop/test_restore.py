"""Restoring: which checkpoint, what fits, what is said."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import Every, Keep, Never, RestoreError, StateError
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Server, start_script
from tests.training.loop.small import Small, same


def trained(where: Path, batches: int = 6, **options: object) -> Small:
    """A checkpoint after every step: an explicit save waits for memory, an automatic one may be put off."""
    run = Small(where, {"policy": Never(), "keep": Keep(last=10), **options})
    run.ckpt.restore()
    for batch in itertools.islice(run.ckpt.data, batches):
        run.update(batch)
        run.ckpt.save()
    run.ckpt.close()
    return run


def test_lines_for_the_person(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    trained(run_dir, 3)
    assert f"Starting fresh: no checkpoint in {run_dir}" in caplog.text
    again = Small(run_dir)
    again.ckpt.restore()
    again.ckpt.close(save=False)
    assert "Restored step 3 from disk in 0.0 s; 0 steps to redo" in caplog.text


def test_older_step_forks_and_the_old_branch_is_never_chosen(run_dir: Path) -> None:
    trained(run_dir, 6)
    fork = Small(run_dir, {"policy": Every(steps=1), "keep": Keep(last=10)})
    assert fork.ckpt.restore(step=3)
    assert fork.ckpt.status().step == 3
    for batch in itertools.islice(fork.ckpt.data, 1):
        fork.update(batch)
    fork.ckpt.close()
    live = {str(entry.id): entry.is_live for entry in scan(RunPaths(run_dir))}
    assert live["step-000000000003.l0001"] and live["step-000000000004.l0002"]
    assert not live["step-000000000006.l0001"]
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 4
    assert same(again.parameters(), fork.parameters())
    again.ckpt.close(save=False)


def test_fork_that_died_before_its_first_commit(run_dir: Path) -> None:
    """Nothing of the new branch is committed: the restart goes on from where the fork began, not from the old end."""
    trained(run_dir, 6)
    fork = Small(run_dir)
    fork.ckpt.restore(step=3)
    fork.ckpt.close(save=False)
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 3
    again.ckpt.close(save=False)


def test_before(run_dir: Path) -> None:
    trained(run_dir, 6)
    run = Small(run_dir)
    assert run.ckpt.restore(before=5)
    assert run.ckpt.status().step == 4
    run.ckpt.close(save=False)


def test_only_the_model(run_dir: Path) -> None:
    old = trained(run_dir, 6)
    for _ in range(2):  # an evaluation script may do so as often as it likes
        run = Small(run_dir, seed=3)
        assert run.ckpt.restore(only="model")
        assert same(run.parameters(), old.parameters())
        assert run.optimizer.state_dict()["state"] == {}
    assert run.ckpt.status().step == 0
    assert len(list((run_dir / "lineage").iterdir())) == 1
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 6
    again.ckpt.close(save=False)


def test_training_on_after_only_starts_a_new_history(run_dir: Path) -> None:
    trained(run_dir, 6)
    run = Small(run_dir, {"policy": Never()})
    assert run.ckpt.restore(only="model")
    run.train(1, stop_after=2)
    run.ckpt.close()
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 2
    again.ckpt.close(save=False)


def test_suspect_checkpoints_come_last(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never(), "keep": Keep(last=10)})
    run.ckpt.restore()
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 5)):
        run.update(batch)
        if number == 3:
            with torch.no_grad():
                run.model[0].weight[0, 0] = float("nan")
        run.ckpt.save()
    run.ckpt.close()
    assert [event["step"] for event in run.events("suspect")] == [4, 5]
    again = Small(run_dir)
    again.ckpt.restore()
    assert again.ckpt.status().step == 3
    again.ckpt.close(save=False)
    further = Small(run_dir)
    further.ckpt.restore(before=3)
    assert further.ckpt.status().step == 2
    further.ckpt.close(save=False)


def test_suspect_checkpoints_do_not_count_in_keep(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never(), "keep": 2})
    run.ckpt.restore()
    for number, batch in enumerate(run.ckpt.data):
        run.update(batch)
        if number == 2:
            with torch.no_grad():
                run.model[0].weight[0, 0] = float("inf")
        run.ckpt.save()
    run.ckpt.close()
    good = [e.id.step for e in scan(RunPaths(run_dir)) if e.manifest is not None and e.manifest.suspect is None]
    assert good == [2, 1]


def test_all_mismatches_are_listed_by_name(run_dir: Path) -> None:
    trained(run_dir, 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    model[1].register_buffer("extra", torch.zeros(3))
    model[0].weight.data = model[0].weight.data.double()
    del model[1].num_batches_tracked
    ckpt = stepwell.Checkpointer(run_dir, model=model, ema=torch.nn.Linear(1, 1))
    with pytest.raises(StateError) as caught:
        ckpt.restore()
    text = str(caught.value)
    for part in (
        "optimizer: in the checkpoint, but not tracked",
        "ema: tracked, but not in the checkpoint",
        "model/1.extra: missing in the checkpoint",
        "model/1.num_batches_tracked: unexpected",
        "model/2.weight: shape (1, 16) in the checkpoint, (2, 16) live",
        "model/0.weight: float32 in the checkpoint, float64 live",
        "strict=False",
    ):
        assert part in text, part


def test_not_strict_restores_what_fits_and_reports(run_dir: Path) -> None:
    old = trained(run_dir, 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    ckpt = stepwell.Checkpointer(run_dir, model=model, policy=Never())
    assert ckpt.restore(strict=False)
    ckpt.close(save=False)
    assert torch.equal(model[0].weight, old.model[0].weight)
    (event,) = old.events("mismatch")
    assert any("model/2.weight" in problem for problem in event["problems"])


def test_damaged_newest_is_skipped_with_an_event(run_dir: Path) -> None:
    trained(run_dir, 4)
    newest = run_dir / "step-000000000004.l0001" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    run = Small(run_dir)
    run.ckpt.restore()
    run.ckpt.close(save=False)
    assert run.ckpt.status().step == 3
    assert [event["directory"] for event in run.events("damage")] == ["step-000000000004.l0001"]


def test_all_damaged_is_an_error_not_a_fresh_start(run_dir: Path) -> None:
    trained(run_dir, 2)
    for manifest in run_dir.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(RestoreError, match="no checkpoint in"):
        Small(run_dir).ckpt.restore()


def test_moved_run_directory_restores(run_dir: Path, tmp_path: Path) -> None:
    old = trained(run_dir, 3)
    shutil.copytree(run_dir, tmp_path / "copied")
    run_dir.rename(tmp_path / "moved")
    for place in ("copied", "moved"):
        run = Small(tmp_path / place)
        assert run.ckpt.restore()
        assert same(run.parameters(), old.parameters())
        run.ckpt.close(save=False)


def test_no_second_copy_of_the_state_in_memory(run_dir: Path) -> None:
    """Parameters, buffers and existing optimizer state are filled where they are."""
    trained(run_dir, 3)
    run = Small(run_dir)
    run.update(torch.zeros(4, 8))
    addresses = {name: value.data_ptr() for name, value in run.model.state_dict().items()}
    moments = {id(p): s["exp_avg"].data_ptr() for p, s in run.optimizer.state.items()}
    run.ckpt.restore()
    run.ckpt.close(save=False)
    assert addresses == {name: value.data_ptr() for name, value in run.model.state_dict().items()}
    assert moments == {id(p): s["exp_avg"].data_ptr() for p, s in run.optimizer.state.items()}


def test_second_restore_is_refused(run_dir: Path) -> None:
    run = trained(run_dir, 1)
    again = Small(run_dir)
    again.ckpt.restore()
    with pytest.raises(stepwell.ConfigError, match="once, before the first batch"):
        again.ckpt.restore()
    again.ckpt.close(save=False)
    with pytest.raises(stepwell.ConfigError, match="closed"):
        run.ckpt.save()


@pytest.mark.parametrize("cap", [None, 3_000_000, 1_200_000, 200_000])
def test_host_memory_cap(cap: int | None, run_dir: Path) -> None:
    """Two slots, one slot, streamed: always the same checkpoint, never more memory than allowed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = stepwell.Checkpointer(
        run_dir, model=model, optimizer=optimizer, policy=Every(steps=1), host_memory=cap, keep=Keep(last=50)
    )
    expected = {}
    for step in range(1, 7):
        model(torch.randn(4, 500)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ckpt.save()
        expected[step] = model.weight.detach().clone()
    ckpt.close()
    fresh = torch.nn.Linear(500, 500)
    reader = stepwell.Checkpointer(run_dir, model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1))
    reader.restore()
    reader.close(save=False)
    assert torch.equal(fresh.weight, expected[6])
    run = Small.__new__(Small)
    run.where = run_dir
    arena = run.events("arena")[0]
    assert arena["slots"] == {None: 2, 3_000_000: 2, 1_200_000: 1, 200_000: 0}[cap]
    assert ("host_memory" in arena["reason"]) == (cap in (1_200_000, 200_000))


def test_copy_of_a_run_does_not_get_the_memory_of_the_original(server: Server, run_dir: Path, tmp_path: Path) -> None:
    """Same run id, another directory: the lingering agent of the original is not its own."""
    script = tmp_path / "train.py"
    script.write_text("""
import os, signal, sys
from pathlib import Path
from tests.training.loop.small import Small
run = Small(Path(sys.argv[1]))
run.ckpt.restore()
run.ckpt.save().wait()
os.kill(os.getpid(), signal.SIGKILL)
""")
    start_script(server, script, run_dir, log=tmp_path / "log", STEPWELL_LINGER="30").wait()
    shutil.copytree(run_dir, tmp_path / "copied")
    sources = []
    for where in (tmp_path / "copied", run_dir):
        run = Small(where)
        assert run.ckpt.restore()
        run.ckpt.close(save=False)
        sources.append(run.events("restore")[-1]["source"])
    assert sources == ["disk", "memory"]
