"""Optimizers around other optimizers, and those that torch has not set up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError


class Subclass(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that never calls the constructor of Optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Delegate:
    """No Optimizer at all."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class Alone(torch.optim.Optimizer):
    """Nothing inside, and nothing set up."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state = {}  # type: ignore[assignment]
        self.defaults = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def accelerated(inner: torch.optim.Optimizer) -> Any:
    module = pytest.importorskip("accelerate.optimizer")
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    return module.AcceleratedOptimizer(inner, device_placement=False)


@pytest.mark.parametrize("wrap", [Subclass, Delegate, lambda inner: Delegate(Subclass(inner)), accelerated])
def test_a_wrapped_optimizer_steps_behind_the_gate_and_comes_back(wrap: Callable[[Any], Any], run_dir: Path) -> None:
    def make() -> tuple[torch.nn.Module, Any, stepwell.Checkpointer]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        optimizer = wrap(torch.optim.Adam(layer.parameters(), lr=0.1))
        tracked = {"layer": layer, "optimizer": optimizer}
        return layer, optimizer, stepwell.Checkpointer(run_dir, policy=stepwell.Every(steps=2), data=[0] * 6, **tracked)

    def train(count: int) -> list[torch.Tensor]:
        layer, optimizer, ckpt = make()
        with ckpt:
            ckpt.restore()
            for done, _ in enumerate(ckpt.data, 1):
                layer(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if done == count:
                    break
        steps.append(ckpt.status().step)
        state = optimizer.state_dict()["state"]
        return [*(value.clone() for value in layer.state_dict().values()), state[0]["exp_avg"], state[0]["step"]]

    steps: list[int] = []
    train(3)
    resumed = train(3)
    run_dir.rename(run_dir.with_name("before"))
    whole = train(6)
    assert steps == [3, 6, 6]
    assert all(torch.equal(one, two) for one, two in zip(resumed, whole, strict=True))


def test_an_optimizer_and_its_wrapper_count_once(run_dir: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    ckpt = stepwell.Checkpointer(run_dir, layer=layer, inner=inner, outer=Subclass(inner))
    assert len(inner._optimizer_step_pre_hooks) == 1
    ckpt.close()


def test_an_optimizer_whose_steps_cannot_be_seen_is_refused(run_dir: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"cannot see the steps of Alone.*track the optimizer"):
        stepwell.Checkpointer(run_dir, layer=layer, optimizer=Alone(layer.parameters()))
