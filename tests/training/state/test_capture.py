"""What is remembered from snapshot to snapshot never differs from what a fresh look would find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepwell.training.state.capture import Capture
from stepwell.training.state.flatten import Flat, flatten
from stepwell.training.state.tracked import Tracked, track


class Setting:
    """A small model with everything that matters: tied weights, buffers hidden and not, a frozen part, two groups."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
        self.model[2].weight = self.model[0].weight
        self.model[3].requires_grad_(False)
        self.model.register_buffer("shown", torch.ones(3))
        self.model.register_buffer("hidden", torch.ones(3), persistent=False)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}])
        self.extra: dict[str, Any] = {"note": 1, "alias": self.model[0].weight}
        self.tracked = track({"extra": self.extra, "model": self.model, "optimizer": self.optimizer})
        self.capture = Capture(self.tracked)
        self.train()

    def train(self) -> None:
        self.model(torch.randn(4, 6)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def content(flat: Flat) -> dict[str, Any]:
    found: dict[str, Any] = {
        leaf.name: (leaf.dtype, leaf.tensor.tolist(), leaf.tensor.data_ptr()) for leaf in flat.leaves
    }
    return found


def fresh(tracked: list[Tracked]) -> Flat:
    """As `Capture` orders it: modules and optimizers first."""
    return Capture(tracked).flatten({"step": 1})


def assert_true(setting: Setting) -> Flat:
    found, expected = setting.capture.flatten({"step": 1}), fresh(setting.tracked)
    assert found.tree == expected.tree
    assert content(found) == content(expected)
    return found


def replace_parameter(setting: Setting) -> None:
    setting.model[2].bias = nn.Parameter(torch.full((6,), 7.0))


def new_storage(setting: Setting) -> None:
    setting.model[0].weight.data = torch.full((6, 6), 3.0)


def transposed(setting: Setting) -> None:
    setting.model[0].weight.data = setting.model[0].weight.data.t()


def other_shape(setting: Setting) -> None:
    setting.model[2].bias.data = setting.model[2].bias.data.view(2, 3)


def replace_buffer(setting: Setting) -> None:
    setting.model.shown = torch.full((3,), 5.0)


def hide_buffer(setting: Setting) -> None:
    setting.model._non_persistent_buffers_set.add("shown")


def add_module(setting: Setting) -> None:
    setting.model.append(nn.Linear(6, 6))


def drop_module(setting: Setting) -> None:
    del setting.model[3]


def rename(setting: Setting) -> None:
    setting.model._parameters["first"] = setting.model[0]._parameters.pop("bias")


def untie(setting: Setting) -> None:
    setting.model[2].weight = nn.Parameter(setting.model[0].weight.detach().clone())


def replace_optimizer_state(setting: Setting) -> None:
    state = setting.optimizer.state[setting.model[0].weight]
    state["exp_avg"] = torch.full((6, 6), 2.0)


def add_optimizer_state(setting: Setting) -> None:
    setting.optimizer.state[setting.model[0].weight]["count"] = 12345


def change_number_in_optimizer_state(setting: Setting) -> None:
    setting.optimizer.state[setting.model[0].weight]["count"] = 10**12
    assert_true(setting)
    setting.optimizer.state[setting.model[0].weight]["count"] += 1


def clear_optimizer_state(setting: Setting) -> None:
    setting.optimizer.state.clear()


def change_group(setting: Setting) -> None:
    setting.optimizer.param_groups[1]["lr"] = 0.5


def lr_as_tensor(setting: Setting) -> None:
    setting.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


def add_group(setting: Setting) -> None:
    setting.optimizer.add_param_group({"params": setting.model[3].parameters()})


def unfreeze(setting: Setting) -> None:
    setting.model[3].requires_grad_(True)


def hook_into_state_dict(setting: Setting) -> None:
    more = torch.ones(1)
    setting.model[0].register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"more": more}))


def own_state_dict(setting: Setting) -> None:
    setting.model.state_dict = lambda: {"mine": torch.ones(2)}  # type: ignore[method-assign]


def change_plain_object(setting: Setting) -> None:
    setting.extra["note"] = 2
    setting.extra["more"] = [torch.ones(2)]


CHANGES: list[Callable[[Setting], None]] = [
    replace_parameter, new_storage, transposed, other_shape, replace_buffer, hide_buffer, add_module, drop_module,
    rename, untie, replace_optimizer_state, add_optimizer_state, change_number_in_optimizer_state,
    clear_optimizer_state, change_group, lr_as_tensor, add_group, unfreeze, hook_into_state_dict, change_plain_object,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(change: Callable[[Setting], None]) -> None:
    setting = Setting()
    assert_true(setting)
    change(setting)
    assert_true(setting)
    assert_true(setting)


def test_control_a_memory_that_always_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the test of the memory all but the changes that are looked at each time go unseen."""
    monkeypatch.setattr("stepwell.training.state.capture._Memory.is_true", lambda self: True)
    unseen = []
    for change in CHANGES:
        setting = Setting()
        setting.capture.flatten({"step": 1})
        try:
            change(setting)
            assert_true(setting)
        except AssertionError:
            unseen.append(change)
    assert set(CHANGES) - set(unseen) <= {change_group, lr_as_tensor, add_group, unfreeze, change_plain_object}


def test_training_alone_is_remembered() -> None:
    setting = Setting()
    first = assert_true(setting)
    for _ in range(3):
        setting.train()
        again = assert_true(setting)
        assert again.fixed is first.fixed and again.fixed is not None
        assert all(a is b for a, b in zip(first.leaves, again.leaves[: again.fixed_count], strict=False))


def test_the_same_leaves_as_a_plain_flatten() -> None:
    setting = Setting()
    plain = flatten({**{item.name: item.state() for item in setting.tracked}, "stepwell": {"step": 1}})
    found = setting.capture.flatten({"step": 1})
    assert len(found.leaves) == len(plain.leaves)
    assert {leaf.tensor.data_ptr() for leaf in found.leaves} == {leaf.tensor.data_ptr() for leaf in plain.leaves}


def test_an_object_that_answers_for_itself_is_always_asked() -> None:
    class Own(nn.Linear):
        asked = 0

        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            type(self).asked += 1
            return {"asked": self.asked}

    own = Own(2, 2)
    capture = Capture(track({"own": own}))
    assert [capture.flatten().tree["own"] for _ in range(3)] == [{"asked": number} for number in (1, 2, 3)]
    assert capture.flatten().fixed is None


def test_a_method_put_in_later_is_seen() -> None:
    setting = Setting()
    assert_true(setting)
    own_state_dict(setting)
    assert setting.capture.flatten({"step": 1}).tree["model"] == {"mine": {"$tensor": "model/mine"}}


def test_a_leaf_that_is_stored_as_a_copy_is_not_remembered() -> None:
    model = nn.Module()
    model.value = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]).conj())
    capture = Capture(track({"model": model}))
    assert capture.flatten().leaves[0].tensor.tolist() == [1 - 1j, 2 + 1j]
    with torch.no_grad():
        model.value.mul_(2)
    flat = capture.flatten()
    assert flat.leaves[0].tensor.tolist() == [2 - 2j, 4 + 2j]
    assert flat.fixed is None
