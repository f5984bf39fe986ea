"""Going on from DCP checkpoints of one process, in every spelling of their keys; and what does not fit is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import stepwell
from stepwell.adapters.dcp import StepwellReader, load_into, parameter_names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.tied = self.layers[0]
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def make(seed: int, kind: str = "adam") -> tuple[Net, torch.optim.Optimizer, Any]:
    """Two groups, in another order than the model's."""
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [*model.layers[2].parameters()], "lr": 0.1 * seed},
        {"params": [*model.layers[0].parameters()]},
    ]
    optimizer: torch.optim.Optimizer
    if kind == "adam":
        optimizer = torch.optim.AdamW(groups, lr=0.01 * seed)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01 * seed, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.randn(6, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def everything(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    return model.state_dict(), optimizer.state_dict(), scheduler.state_dict()


def assert_same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{path}/{number}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b, path


def raw(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def named(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found, state = get_state_dict(model, optimizer)
    return {"model": found, "optimizer": state}


def flat(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": found, "optimizer": state}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("style", [raw, named, flat])
def test_from_a_dcp_checkpoint(style: Callable[..., dict[str, Any]], kind: str, tmp_path: Path) -> None:
    theirs, ours = make(1, kind), make(2, kind)
    train(*theirs)
    dcp.save({**style(*theirs[:2]), "scheduler": theirs[2]}, checkpoint_id=tmp_path / "dcp")
    load_into(tmp_path / "dcp", model=ours[0], optimizer=ours[1], scheduler=ours[2])
    assert ours[0].tied.weight is ours[0].layers[0].weight
    assert_same(everything(*ours), everything(*theirs))
    torch.manual_seed(5)
    train(*theirs)
    torch.manual_seed(5)
    train(*ours)
    assert_same(everything(*ours), everything(*theirs))


def test_a_bare_state_dict_of_a_model(tmp_path: Path) -> None:
    theirs, ours = make(1), make(2)
    dcp.save(theirs[0].state_dict(), checkpoint_id=tmp_path / "dcp")
    load_into(tmp_path / "dcp", model=ours[0])
    assert_same(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
    inner = [nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 1)}) for _ in range(2)]
    dcp.save(inner[0].state_dict(), checkpoint_id=tmp_path / "inner")  # keys that begin with `model.` all the same
    load_into(tmp_path / "inner", model=inner[1])
    assert_same(dict(inner[1].state_dict()), dict(inner[0].state_dict()))


def test_what_does_not_fit_is_told_before_anything_changes(tmp_path: Path) -> None:
    theirs, (model, optimizer, scheduler) = make(1), make(2)
    theirs[0].layers[2] = nn.Linear(4, 3)
    del theirs[0].frozen
    theirs[0].extra = nn.Parameter(torch.ones(1))
    dcp.save({"model": theirs[0].state_dict()}, checkpoint_id=tmp_path / "dcp")
    before = everything(*make(2))
    with pytest.raises(stepwell.StateError) as refused:
        load_into(tmp_path / "dcp", model=model, optimizer=optimizer)
    for problem in (
        "model.frozen: missing in the checkpoint",
        "model.layers.2.weight: shape (3, 4) in the checkpoint, (2, 4) live",
        "model.extra: unexpected",
        "optimizer: no optimizer of this name",
    ):
        assert problem in str(refused.value)
    assert_same(everything(model, optimizer, scheduler), before)
    load_into(tmp_path / "dcp", model=model, strict=False)
    assert torch.equal(model.layers[0].weight, theirs[0].layers[0].weight)
    assert torch.equal(model.layers[2].weight, before[0]["layers.2.weight"])
    with pytest.raises(stepwell.ConfigError, match="notes= has no state_dict"):
        load_into(tmp_path / "dcp", notes=3)


def test_going_on_counts_no_step_for_the_loading(tmp_path: Path) -> None:
    """The recipe of the docs: the run's own checkpoints first; the DCP one only where there is none yet."""
    theirs = make(1)
    train(*theirs)
    dcp.save(raw(*theirs[:2]), checkpoint_id=tmp_path / "dcp")
    for start in (0, 3):
        model, optimizer, scheduler = make(2)
        ckpt = stepwell.Checkpointer(
            tmp_path / "run", model=model, optimizer=optimizer, policy=stepwell.Never(), grace=None
        )
        if not ckpt.restore():
            load_into(tmp_path / "dcp", model=model, optimizer=optimizer)
            assert_same(optimizer.state_dict(), theirs[1].state_dict())
        assert ckpt.status().step == start
        for _ in range(3):
            train(model, optimizer, scheduler, 1)
            ckpt.step()
        ckpt.save().wait(60)
        assert ckpt.status().step == start + 3
        ckpt.close(save=False)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Any]:
    """A run of one rank, and what it saved last, at step 3."""
    objects = make(1)
    train(*objects)
    notes = {"phase": ("a", 1), "best": torch.arange(4.0), "nested": [{"x": 1}, torch.ones(2)]}
    ckpt = stepwell.Checkpointer(
        tmp_path / "run", model=objects[0], optimizer=objects[1], scheduler=objects[2], notes=notes,
        policy=stepwell.Never(), grace=None,
    )  # fmt: skip
    ckpt.restore()
    for _ in range(3):
        train(*objects, 1)
        ckpt.step()
    ckpt.save().wait(60)
    ckpt.close(save=False)
    return tmp_path / "run", everything(*objects)


def test_dcp_load_through_our_reader(run: tuple[Path, Any]) -> None:
    path, expected = run
    model, optimizer, scheduler = make(2)
    train(model, optimizer, scheduler)  # state that is there: DCP loads into it
    half = {name: tensor.double() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler, "notes": {}}
    state["notes"] = {"phase": None, "best": torch.zeros(4, 2).t()[0], "nested": [{"x": 0}, torch.zeros(2)]}
    dcp.load(state, storage_reader=StepwellReader(path))
    optimizer.load_state_dict(state["optimizer"])
    assert_same(everything(model, optimizer, scheduler), expected)
    assert state["notes"]["phase"] == ("a", 1) and state["notes"]["nested"][0] == {"x": 1}
    assert state["notes"]["best"].tolist() == [0.0, 1.0, 2.0, 3.0]
    dcp.load({"model": half}, storage_reader=StepwellReader(path, step=3))  # another type: converted, as DCP does it
    assert torch.equal(half["layers.0.weight"], expected[0]["layers.0.weight"].double())


def test_names_in_the_place_of_numbers(run: tuple[Path, Any]) -> None:
    path, expected = run
    model, optimizer, _ = make(2)
    names = parameter_names(model, optimizer)
    assert names == ["layers.2.weight", "layers.2.bias", "layers.0.weight", "layers.0.bias"]
    state = named(model, optimizer)
    dcp.load(state, storage_reader=StepwellReader(path, names={"optimizer": names}))
    dcp.state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_same(optimizer.state_dict(), expected[1])
    with pytest.raises(stepwell.ConfigError, match="do not belong to this model"):
        parameter_names(nn.Linear(1, 1), optimizer)


def test_load_into_takes_our_reader_too(run: tuple[Path, Any]) -> None:
    path, expected = run
    objects = make(2)
    load_into(StepwellReader(path), model=objects[0], optimizer=objects[1], scheduler=objects[2])
    assert_same(everything(*objects), expected)


def test_nothing_there(run: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(stepwell.RestoreError, match="no readable checkpoint of step 7"):
        load_into(StepwellReader(run[0], step=7), model=make(2)[0])
    with pytest.raises(stepwell.RestoreError, match="has no readable checkpoint"):
        load_into(StepwellReader(tmp_path / "nowhere"), model=make(2)[0])
    assert StepwellReader.validate_checkpoint_id(run[0])
    assert not StepwellReader.validate_checkpoint_id(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
            dcp.load({"model": {"ghost": torch.ones(1)}}, storage_reader=StepwellReader(run[0]))
