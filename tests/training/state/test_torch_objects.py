"""The state of every stock optimizer and scheduler, of scalers, averaged models and generators comes back."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from stepwell.errors import DamagedError
from stepwell.training.state import rng
from stepwell.training.state.tracked import Tracked, track
from tests.training.state.same import difference
from tests.training.state.through import round_trip

NOT_FOR_DENSE = {"Optimizer", "SparseAdam"}
OPTIMIZERS = sorted(
    name for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in NOT_FOR_DENSE
)  # fmt: skip
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),  # keeps a Counter
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def stepped(name: str) -> torch.optim.Optimizer:
    net = model()
    parameters = [p for p in net.parameters() if p.dim() == 2] if name == "Muon" else list(net.parameters())
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.01)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    state = stepped(name).state_dict()
    found = round_trip(state)
    assert difference(found, state) is None
    fresh = stepped(name)
    fresh.load_state_dict(found)
    assert difference(fresh.state_dict(), state) is None


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    optimizer = stepped("SGD")
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    state = scheduler.state_dict()
    found = round_trip(state)
    assert difference(found, state) is None
    fresh = SCHEDULERS[name](stepped("SGD"))
    fresh.load_state_dict(found)
    assert difference(fresh.state_dict(), state) is None


@pytest.mark.parametrize(
    "target",
    [torch.amp.GradScaler("cpu"), swa_utils.AveragedModel(model()), torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(2, 2)), torch.Generator().manual_seed(3)],
    ids=lambda target: type(target).__name__,
)  # fmt: skip
def test_other_objects(target: Any) -> None:
    state = Tracked("x", target).state()
    found = round_trip(state)
    assert difference(found, state) is None
    Tracked("x", target).load(found)


def test_plain_trees_are_refilled_in_place() -> None:
    values, items = {"a": 1}, [1, 2]
    (first, second) = track({"values": values, "items": items})
    first.load({"b": 2})
    second.load([3])
    assert values == {"b": 2} and items == [3]


# -- the global generators --------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(torch.rand(1)),
        float(torch.randn(1)),
    ]


def test_generators_go_on_where_they_were() -> None:
    numpy.random.randn()  # leaves a cached gaussian behind
    state = rng.capture()
    assert difference(rng.capture(), state) is None, "capturing must not draw"
    expected = draws()
    assert draws() != expected, "control: the generators move"
    rng.check(state)
    assert rng.restore(round_trip(state)) == []
    assert draws() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"python": None},
        {"python": (3, (1, 2), None)},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": "x"},
        {"numpy": ("MT19937", [1, 2], 3, 0, 0.0)},
        {"numpy": ("PCG64", [1], 0, 0, 0.0)},
        {"cuda": [torch.zeros(16)]},
        {"cuda": 5},
    ],
    ids=str,
)
def test_a_state_that_no_generator_takes_is_damage(change: dict[str, Any]) -> None:
    state = rng.capture()
    expected = draws()
    rng.restore(state)
    with pytest.raises(DamagedError, match="state of the random generators is not valid"):
        rng.check({**state, **change})
    assert draws() == expected, "checking must not set anything"


@pytest.mark.parametrize(("is_available", "counted", "here"), [(False, 1, 0), (True, 1, 1), (True, 2, 2)])
def test_generators_of_devices_that_are_not_here_are_told(
    monkeypatch: pytest.MonkeyPatch, is_available: bool, counted: int, here: int
) -> None:
    """A driver too old for this torch: no device can be used, NVML counts them all the same."""
    state = {**rng.capture(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    was_set: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, index: was_set.append(index))
    expected = [] if here == 2 else [f"CUDA generators: saved 2, here are {here}"]
    assert rng.restore(state) == expected
    assert was_set == list(range(here))


def test_a_missing_generator_is_damage() -> None:
    with pytest.raises(DamagedError):
        rng.check({"python": rng.capture()["python"]})
    with pytest.raises(DamagedError):
        rng.check(None)
