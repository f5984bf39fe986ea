"""Live tensors that cannot be filled like others: lazy ones, expanded ones, views that overlap, and the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepwell.errors import StateError
from stepwell.training.state.flatten import flatten
from tests.restore.build import RunBuilder, restore
from tests.training.state.same import difference


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


def lazy(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyConv1d(4, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    model(torch.randn(2, 3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("strict", [True, False])
def test_lazy_modules_take_their_shapes_from_the_checkpoint(strict: bool, build: RunBuilder) -> None:
    model = lazy(1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    build.write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 2)
    other = lazy(2)
    its = torch.optim.Adam(other.parameters())
    restore(build.root, {"model": other, "optimizer": its}, strict=strict)
    for some in ((other, its), (model, optimizer)):
        step(*some)
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(its.state_dict(), optimizer.state_dict()) is None


def test_a_lazy_module_that_has_no_shapes_yet_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        StateError, match=r"model/0\.weight: cannot store a lazy parameter without a shape; run one forward pass"
    ):
        flatten({"model": lazy(1).state_dict()})


class Expanded(nn.Module):
    def __init__(self, seed: int, *, is_expanded: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        values = torch.randn(1, 4)
        self.register_buffer("scale", values.expand(3, 4) if is_expanded else torch.randn(3, 4))
        self.register_buffer("not_a_number", torch.full((), float("nan"), dtype=torch.complex128).expand(2, 5))
        self.register_buffer("windows", torch.randn(6).as_strided((2, 3), (2, 1)))
        self.inner = nn.Linear(2, 2)


def test_an_expanded_buffer_comes_back(build: RunBuilder) -> None:
    model = Expanded(1)
    build.write({"model": model.state_dict()}, 1)
    other = Expanded(2)
    restore(build.root, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert [other.scale.stride(), other.not_a_number.stride()] == [(0, 1), (0, 0)]


def test_an_expanded_buffer_cannot_take_several_values(build: RunBuilder) -> None:
    build.write({"model": Expanded(1, is_expanded=False).state_dict()}, 1)
    with pytest.raises(StateError, match=r"model/scale: the live tensor is expanded.*\.clone\(\)"):
        restore(build.root, {"model": Expanded(2)})


def test_what_was_expanded_fills_what_is_not(build: RunBuilder) -> None:
    model = Expanded(1)
    build.write({"model": model.state_dict()}, 1)
    other = Expanded(2, is_expanded=False)
    restore(build.root, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None and other.scale.is_contiguous()


def test_tied_weights_of_other_strides_stay_tied(build: RunBuilder) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.encode = nn.Linear(3, 4, bias=False)
            self.decode = nn.Linear(4, 3, bias=False)
            self.decode.weight = nn.Parameter(self.encode.weight.detach().t())

    model, other = Tied(1), Tied(2)
    build.write({"model": model.state_dict()}, 1)
    restore(build.root, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert other.decode.weight.data_ptr() == other.encode.weight.data_ptr()


def test_a_model_on_the_meta_device_is_not_taken_for_restored(build: RunBuilder) -> None:
    model = nn.Linear(2, 3)
    build.write({"model": model.state_dict()}, 1)
    with pytest.raises(StateError, match=r"model/weight: the live tensor is on the meta device; call to_empty"):
        restore(build.root, {"model": nn.Linear(2, 3, device="meta")})
    other = nn.Linear(2, 3, device="meta").to_empty(device="cpu")
    restore(build.root, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None


def test_conjugate_and_negative_views_are_filled(build: RunBuilder) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Module()
        model.register_buffer("conjugate", torch.randn(2, 3, dtype=torch.complex64).conj())
        model.register_buffer("negative", torch.randn(2, 3, dtype=torch.complex64).conj().imag)
        return model

    model, other = made(1), made(2)
    build.write({"model": model.state_dict()}, 1)
    restore(build.root, {"model": other})
    found: Any = other.state_dict()
    assert difference(found, model.state_dict()) is None and found["conjugate"].is_conj() and found["negative"].is_neg()
