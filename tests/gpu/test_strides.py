"""On CUDA: what a fused optimizer keeps for parameters that do not lie row by row comes back as it lay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from tests.training.snapshot.truth import same_bytes

pytestmark = pytest.mark.gpu

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adamw capturable": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True, capturable=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


class Net(torch.nn.Module):
    """Small ones, one of many blocks, one with a single channel, and one that is twice as precise."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.image = torch.nn.Parameter(torch.randn(8, 3, 5, 5))
        self.single = torch.nn.Parameter(torch.randn(8, 1, 3, 3))
        self.large = torch.nn.Parameter(torch.randn(1500, 1501))
        self.precise = torch.nn.Parameter(torch.randn(33, 65).double())
        self.plain = torch.nn.Parameter(torch.randn(7))
        for name in ("image", "single"):
            value = getattr(self, name).detach().to(device, memory_format=torch.channels_last)
            setattr(self, name, torch.nn.Parameter(value))
        for name in ("large", "precise"):
            setattr(self, name, torch.nn.Parameter(getattr(self, name).detach().to(device).t().contiguous().t()))
        self.plain = torch.nn.Parameter(self.plain.detach().to(device))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.empty_like(parameter).copy_(values)
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [optimizer.state[parameter].values() for parameter in model.parameters()]
    return [*model.parameters(), *(value for values in kept for value in values if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("snapshot", ["overlap", "device", "blocking"])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_one_step_later_the_bits_are_the_same(kind: str, snapshot: str, has_stepped: bool, run_dir: Path) -> None:
    model = Net(1, "cuda")
    optimizer = FUSED[kind](model.parameters())
    with stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, policy=stepwell.Never(),
                               snapshot=snapshot) as ckpt:  # fmt: skip
        for number in range(3):
            step(model, optimizer, number)
            ckpt.step()
        ckpt.save().wait()
    other = Net(2, "cuda")
    its = FUSED[kind](other.parameters())
    if has_stepped:
        step(other, its, 9)
    where = [parameter.data_ptr() for parameter in other.parameters()]
    again = stepwell.Checkpointer(run_dir, model=other, optimizer=its, policy=stepwell.Never())
    assert again.restore()
    again.close(save=False)
    assert [parameter.data_ptr() for parameter in other.parameters()] == where, "filled where they are"
    for number in (3, 4):
        pairs = list(zip(tensors(model, optimizer), tensors(other, its), strict=True))
        assert [a.stride() for a, _ in pairs] == [b.stride() for _, b in pairs]
        assert all(a.device == b.device and a.dtype == b.dtype and same_bytes(a, b) for a, b in pairs)
        step(model, optimizer, number)
        step(other, its, number)


@pytest.mark.parametrize(("saved_on", "restored_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_it_moves_between_devices(saved_on: str, restored_on: str, run_dir: Path) -> None:
    model = Net(1, saved_on)
    optimizer = FUSED["adam"](model.parameters())
    with stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, policy=stepwell.Never()) as ckpt:
        step(model, optimizer, 0)
        ckpt.step()
        ckpt.save().wait()
    other = Net(2, restored_on)
    its = FUSED["adam"](other.parameters())
    again = stepwell.Checkpointer(run_dir, model=other, optimizer=its, policy=stepwell.Never())
    assert again.restore()
    again.close(save=False)
    pairs = list(zip(tensors(model, optimizer), tensors(other, its), strict=True))
    assert all(a.stride() == b.stride() and same_bytes(a, b) for a, b in pairs)
