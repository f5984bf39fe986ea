"""`dcp.save` into a run, in one process: what is there afterwards, what is refused, who may go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import stepwell
from stepwell.adapters.dcp import StepwellReader
from stepwell.adapters.dcp_writer import StepwellWriter
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.ranks.conftest import soak
from tests.tools.cli.commands import good


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(run: Path, step: int, state: dict[str, Any], planner: DefaultSavePlanner | None = None, **wishes: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: no process group
        dcp.save(state, storage_writer=StepwellWriter(run, step, **wishes), planner=planner)


def steps(run: Path) -> list[int]:
    return [entry.id.step for entry in scan(RunPaths(run)) if entry.is_live and entry.is_good]


def test_what_dcp_saves_a_checkpointer_takes_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer = make(0)
    extra = {"count": 7, "tags": ["a", None], "array": numpy.arange(5.0), "tied": model[0].weight}
    save(run, 12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra})
    drawn = torch.rand(3)
    good("verify", run)
    other, theirs = make(1)
    more: dict[str, Any] = {"extra": {"count": 0, "tags": [], "array": numpy.zeros(5), "tied": torch.zeros(8, 4)}}
    ckpt = stepwell.Checkpointer(run, model=other, optimizer=theirs, track=more, grace=None)
    assert ckpt.restore() and ckpt.status().step == 12
    assert torch.equal(torch.rand(3), drawn) and list(more["extra"]["array"]) == [0, 1, 2, 3, 4]
    ckpt.close(save=False)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    for mine, back in zip(optimizer.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(mine[key], back[key]) for key in mine)
    assert theirs.param_groups[0]["lr"] == 0.1
    target: dict[str, Any] = {"extra": {"count": 0, "tags": [], "tied": torch.zeros(8, 4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=StepwellReader(run))
    assert target["extra"]["count"] == 7 and target["extra"]["tags"] == ["a", None]
    assert torch.equal(target["extra"]["tied"], model[0].weight)


class CachingPlanner(DefaultSavePlanner):
    """torch keeps plans by the name of the planner's class: these are of this file alone."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def test_a_planner_that_keeps_its_plans_writes_each_checkpoint_for_itself(tmp_path: Path) -> None:
    """torch gives the writer the plan of the first save again, and with it that save's checkpoint."""
    run, kept = tmp_path / "run", []
    for step in (10, 20, 30):
        model = torch.nn.Linear(4, 4)
        kept.append(model.weight.detach().clone())
        save(run, step, {"model": model.state_dict()}, planner=CachingPlanner(), keep=9)
    assert steps(run) == [30, 20, 10]
    for step, weight in zip((10, 20, 30), kept, strict=True):
        other = torch.nn.Linear(4, 4)
        ckpt = stepwell.Checkpointer(run, model=other, grace=None)
        assert ckpt.restore(step=step, only="model") and torch.equal(other.weight, weight)
    good("verify", run)


def test_one_after_the_other_with_retention(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        model, _ = make(step)
        save(run, step, {"model": model.state_dict()}, keep=2)
    assert steps(run) == [30, 20]
    save(run, 25, {"model": model.state_dict()})  # back to an earlier step: what came after it is another branch
    assert steps(run) == [25, 20]


def test_what_cannot_be_stored_is_refused_and_nothing_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(CheckpointException, match=r"extra.*object"):
        save(run, 1, {"model": make(0)[0].state_dict(), "extra": {"thing": object()}})
    assert steps(run) == []
    with pytest.raises(stepwell.ConfigError, match="give the number"):
        StepwellWriter(run, "12")  # type: ignore[arg-type]


def test_a_checkpointer_that_works_on_the_run_loses_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer = make(0)
    ckpt = stepwell.Checkpointer(run, model=model, optimizer=optimizer, policy=stepwell.Never(), grace=None)
    ckpt.restore()
    ckpt.save().wait()
    save(run, 5, {"model": model.state_dict()})
    optimizer.step()
    ckpt.step()
    with pytest.raises(stepwell.PersistError, match="lineage 2 continues this run"):
        ckpt.save().wait()
    ckpt.close(save=False)
    assert steps(run)[0] == 5


KILLED = """
import sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.adapters.test_dcp_writer import make, save
save(Path(sys.argv[2]), 20, {"model": make(20)[0].state_dict()})
"""


@pytest.mark.parametrize(
    "point", [soak("record.written"), "record.linked", soak("manifest.written"), "manifest.linked"]
)
def test_killed_at(point: str, tmp_path: Path) -> None:
    """Up to its manifest the older one is in force, from there on the new one; the next save clears up what is left."""
    run = tmp_path / "run"
    save(run, 10, {"model": make(10)[0].state_dict()})
    words = [sys.executable, "-c", KILLED, str(Path(__file__).parents[2]), str(run)]
    killed = subprocess.run(words, env={**os.environ, "STEPWELL_CRASH": f"{point}:0:1"}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(run) == ([20, 10] if point == "manifest.linked" else [10])
    good("verify", run)
    save(run, 30, {"model": make(30)[0].state_dict()})
    assert steps(run) == ([30, 20] if point == "manifest.linked" else [30, 10])
    assert [entry.id.step for entry in scan(RunPaths(run))] == steps(run), "nothing is left of what was killed"
