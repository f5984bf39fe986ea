"""FSDP2's modules are remembered like plain ones: a trigger costs little, and never differs from a fresh look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stepwell.training.state import capture, shards
from stepwell.training.state.capture import Capture
from stepwell.training.state.flatten import Flat
from stepwell.training.state.shards import is_only_here, mesh_of
from stepwell.training.state.tracked import track


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """One rank that really talks, to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Setting:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mesh = init_device_mesh("cpu", (1,))
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        for part in (self.model[0], self.model[2]):
            fully_shard(part, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked = track({"model": self.model, "optimizer": self.optimizer})
        self.capture = Capture(self.tracked)
        self.train()

    def train(self) -> None:
        self.model(torch.randn(4, 6)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def content(flat: Flat) -> dict[str, Any]:
    return {leaf.name: (leaf.dtype, leaf.tensor.tolist(), leaf.tensor.data_ptr(), leaf.box) for leaf in flat.leaves}


def look(setting: Setting) -> Flat:
    found = setting.capture.flatten({"step": 1})
    expected = Capture(setting.tracked).flatten({"step": 1})
    assert found.tree == expected.tree and content(found) == content(expected)
    return found


def test_training_alone_is_remembered() -> None:
    setting = Setting()
    first = look(setting)
    assert first.fixed is not None and first.fixed_count > 15
    assert sum(leaf.origin is not None for leaf in first.leaves) == 18, "parameters and moments are parts"
    for _ in range(3):
        setting.train()
        again = look(setting)
        assert again.fixed is first.fixed
        assert all(a is b for a, b in zip(first.leaves, again.leaves[: again.fixed_count], strict=False))


def local_elsewhere(setting: Setting) -> None:
    weight: Any = setting.model[0].weight
    weight._local_tensor = torch.full_like(weight._local_tensor, 3.0)


def local_data(setting: Setting) -> None:
    weight: Any = setting.model[0].weight
    weight._local_tensor.data = torch.full_like(weight._local_tensor, 3.0)


def moment_elsewhere(setting: Setting) -> None:
    state = setting.optimizer.state[setting.model[0].weight]
    state["exp_avg"] = distribute_tensor(torch.full((6, 6), 2.0), setting.mesh)


def otherwise_placed(setting: Setting) -> None:
    weight: Any = setting.model[0].weight
    whole = distribute_tensor(torch.ones(6, 6), setting.mesh, [Replicate()])
    weight._spec = whole._spec  # type: ignore[attr-defined]


def parameter_replaced(setting: Setting) -> None:
    setting.model[0].bias = nn.Parameter(distribute_tensor(torch.ones(6), setting.mesh))


def hook_of_the_users_own(setting: Setting) -> None:
    setting.model[1].register_state_dict_pre_hook(lambda module, *_: module.running_mean.add_(1))


CHANGES = [
    local_elsewhere, local_data, moment_elsewhere, otherwise_placed, parameter_replaced, hook_of_the_users_own,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(change: Callable[[Setting], None]) -> None:
    setting = Setting()
    fixed = look(setting).fixed
    change(setting)
    assert setting.capture.flatten({"step": 1}).fixed is not fixed
    if change is not hook_of_the_users_own:  # which changes the state each time it is asked
        look(setting)


def test_whole_parameters_are_put_back_before_they_are_looked_at() -> None:
    """As they are between a forward and a backward pass, or after `unshard()`."""
    setting = Setting()
    look(setting)
    setting.model[0].unshard()  # type: ignore[operator]
    assert not isinstance(setting.model[0].weight, DTensor)
    found = look(setting)
    assert isinstance(setting.model[0].weight, DTensor) and found.fixed is not None


def test_control_a_hook_that_is_not_known_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "only_shards", lambda hook: False)
    setting = Setting()
    assert look(setting).fixed_count < 15, "only the optimizer is remembered"


def test_control_a_memory_that_does_not_look_at_locals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        capture._Memory, "_place", lambda self: ([leaf.tensor.data_ptr() for leaf in self.collector.leaves],)
    )
    setting = Setting()
    look(setting)
    local_elsewhere(setting)
    with pytest.raises(AssertionError):
        look(setting)


def test_a_mesh_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_mesh_digests", {})
    mesh = init_device_mesh("cpu", (1,))
    tensors = [distribute_tensor(torch.ones(4), mesh) for _ in range(3)]
    assert len({mesh_of(tensor) for tensor in tensors}) == 1
    assert len(shards._mesh_digests) == 1


def test_who_else_may_hold_the_same_part() -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert is_only_here(sharded, 1), "a mesh of all ranks, on which each has another part"
    assert not is_only_here(sharded, 2), "another mesh may hold it, too"
    assert not is_only_here(distribute_tensor(torch.ones(4), mesh, [Replicate()]), 1)
