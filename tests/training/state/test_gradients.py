"""Gradients that wait for their step: found when a backward pass has run, saved, and given back."""

from __future__ import annotations

import sys

import pytest
import torch

from stepwell.training.state.gradients import Gradients
from stepwell.training.state.tracked import Tracked, track


class Two:
    """Two parameters and their optimizer, watched."""

    def __init__(self, count: int = 2) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.watched = Gradients([Tracked("optimizer", self.optimizer)])
        self.watched.begin()

    def backward(self) -> None:
        torch.stack([parameter.sum() for parameter in self.parameters]).sum().backward()

    def step(self) -> None:
        self.watched.note_step(self.optimizer)
        self.optimizer.step()

    def pending(self, *, is_part: bool = True) -> dict[str, dict[str, torch.Tensor]]:
        return self.watched.pending(is_part=is_part)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_pass_is_seen(set_to_none: bool) -> None:
    two = Two()
    assert not two.watched.have_changed()
    for _ in range(3):
        two.backward()
        assert two.watched.have_changed()
        assert not two.watched.have_changed()
    two.step()
    two.optimizer.zero_grad(set_to_none=set_to_none)
    two.watched.have_changed()
    two.backward()
    assert two.watched.have_changed()


def test_a_gradient_in_the_memory_of_a_cleared_one_is_seen() -> None:
    """The allocator gives the same memory, and Python the same id, again and again."""
    two = Two(1)
    for _ in range(50):
        two.backward()
        assert two.watched.have_changed()
        two.optimizer.zero_grad()
        two.backward()
        assert two.watched.have_changed()
        two.optimizer.zero_grad()


def test_what_an_optimizer_used_is_not_pending() -> None:
    two = Two()
    two.backward()
    assert set(two.pending()["optimizer"]) == {"0", "1"}
    two.step()
    two.watched.end_iteration()
    assert two.pending() == {} and two.pending(is_part=False) == {}
    two.optimizer.zero_grad(set_to_none=False)
    assert two.pending() == {}, "zeros are nothing to keep"
    two.backward()
    assert two.pending(is_part=False) == {}, "after a step that it had a part in, what is there is left over"
    assert two.pending() != {}


def test_an_optimizer_that_steps_less_often_keeps_its_gradients() -> None:
    """After a step of the run in which only the other one stepped."""
    often, rare = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    one, other = torch.optim.SGD([often], lr=0.1), torch.optim.SGD([rare], lr=0.1)
    watched = Gradients(track({"one": one, "other": other}))
    watched.begin()
    for _ in range(2):
        (often.sum() + rare.sum()).backward()
        watched.note_step(one)
        one.step()
        one.zero_grad()
        watched.end_iteration()
    assert set(watched.pending(is_part=False)) == {"other"}
    assert torch.equal(watched.pending(is_part=False)["other"]["0"], torch.full((2,), 2.0))


def test_a_loss_that_runs_back_into_a_model_that_has_stepped_leaves_nothing_pending() -> None:
    """A discriminator's parameters get gradients of the generator's loss, and clear them before they are used."""
    two = Two()
    two.backward()
    two.step()
    two.backward()
    two.watched.end_iteration()
    assert two.pending(is_part=False) == {}
    assert not two.watched.are_unused()


def test_they_come_back() -> None:
    two, again = Two(), Two()
    two.backward()
    two.backward()
    assert again.watched.restore(two.pending()) == []
    assert all(torch.equal(parameter.grad, torch.full((3,), 2.0)) for parameter in again.parameters)  # type: ignore[arg-type]
    assert again.pending(is_part=False) != {}, "they wait still"


def test_what_does_not_fit_is_named() -> None:
    two, other = Two(), Two(1)
    two.backward()
    (problem,) = other.watched.restore(two.pending())
    assert "parameter 1" in problem


def test_gradients_from_before_belong_to_nobody() -> None:
    two = Two()
    two.backward()
    two.watched.begin()
    assert two.pending() == {}


def test_parameters_that_are_thawed_later_are_seen() -> None:
    two = Two(5)
    for parameter in two.parameters[1:-1]:
        parameter.requires_grad_(False)
    two.watched.begin()
    for index, parameter in enumerate(two.parameters):
        parameter.requires_grad_(index == 2)
    two.watched.have_changed()
    two.backward()
    assert two.watched.have_changed()
    assert set(two.pending()["optimizer"]) == {"2"}


def test_parameters_that_are_added_later_are_seen() -> None:
    two = Two()
    more = torch.nn.Parameter(torch.ones(3))
    two.optimizer.add_param_group({"params": [more]})
    two.watched.have_changed()
    more.sum().backward()
    assert two.watched.have_changed()


def test_a_backward_pass_is_seen_although_its_gradients_are_gone() -> None:
    """A GradScaler leaves the first steps out where numbers overflow, and the loop clears their gradients."""
    two = Two()
    for _ in range(2):
        two.backward()
        two.optimizer.zero_grad()
        assert two.watched.have_changed()
        assert not two.watched.have_changed()
    assert two.pending() == {}


class Unreached(Two):
    """The first and the last parameters have no part in any loss."""

    def __init__(self) -> None:
        super().__init__(7)

    def backward(self) -> None:
        torch.stack([parameter.sum() for parameter in self.parameters[2:5]]).sum().backward()


def test_parameters_that_no_loss_reaches_hide_nothing() -> None:
    two = Unreached()
    two.backward()
    assert two.watched.have_changed()
    assert set(two.pending()["optimizer"]) == {"2", "3", "4"}
    for _ in range(3):
        two.step()
        two.optimizer.zero_grad()
        two.watched.end_iteration()
        assert two.pending() == {}
        two.watched.have_changed()
        two.backward()
        assert two.watched.have_changed()
        assert set(two.pending()["optimizer"]) == {"2", "3", "4"}


@pytest.mark.parametrize("has_stepped", [True, False])
def test_nothing_stays_at_the_parameters(has_stepped: bool) -> None:
    two = Two()
    assert all(parameter._post_accumulate_grad_hooks for parameter in two.parameters)
    two.backward()
    if has_stepped:
        two.step()
        two.watched.end_iteration()
    else:
        two.watched.end()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in two.parameters)


def test_a_step_costs_the_same_however_many_optimizers_there_are() -> None:
    """With one for each parameter (steps in the backward pass) there are hundreds."""

    def lines(count: int) -> int:
        optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(count)]
        watched = Gradients([Tracked(str(number), each) for number, each in enumerate(optimizers)])
        watched.begin()
        found = 0

        def trace(*_: object) -> object:
            nonlocal found
            found += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            watched.note_step(optimizers[-1])
        finally:
            sys.settrace(before)
        return found

    assert lines(300) == lines(3)
