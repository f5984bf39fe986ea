"""Gradients that wait for their optimizer's step.

Owns:    the sign that a backward pass has run, and pending gradients as part of the state.
Holds:   only what an optimizer has not used yet is pending: gradients that it used and nobody cleared are not. The sign
         looks at a few parameters and costs microseconds, whatever the size of the model. Until an optimizer has
         stepped it is not known which of them are used at all, and a step that a GradScaler leaves out may have cleared
         gradients again: up to then backward passes are heard of as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from stepwell.training.state.shards import is_distributed, like, local_of
from stepwell.training.state.tracked import Tracked

_WATCHED: Final = 2
_HEARD: Final = 64
"""Parameters, spread over all, that tell of the first backward passes."""
_Sign = list[tuple[TensorWeakRef, int] | None]


class _Hearing:
    """Counts what backward passes do to parameters. It holds none of them."""

    def __init__(self) -> None:
        self.count = 0
        self._handles: list[RemovableHandle] = []

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        self.end()
        plain = [each for each in parameters if each.requires_grad and not (is_lazy(each) or is_distributed(each))]
        self._handles = [each.register_post_accumulate_grad_hook(self._note) for each in _spread(plain, _HEARD)]

    def _note(self, parameter: torch.Tensor) -> None:
        self.count += 1

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Watch:
    """A few parameters of one optimizer, spread over all it has, and how their gradients were when last looked at."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._counts: list[int] = []
        self._watched: list[torch.Tensor] = []
        self._before: _Sign = []
        self._at_step: _Sign = []
        self._has_stepped = self._had_part = False
        self._hearing = _Hearing()
        self._heard = self._heard_at_step = 0

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def has_changed(self) -> bool:
        """Whether gradients are others than when this was asked before."""
        now, heard = self._look(), self._hearing.count
        changed = heard != self._heard or not _is_same(now, self._before)
        self._before, self._heard = now, heard
        return changed

    def begin(self) -> None:
        self._hearing.begin(self.parameters())
        self._note_used()

    def _note_used(self) -> None:
        """What is there now belongs to no step that is still to come."""
        self._before = self._at_step = self._look()
        self._heard = self._heard_at_step = self._hearing.count

    def note_step(self) -> None:
        self._has_stepped = True
        if all(parameter.grad is None for parameter in self._watched):  # the loss does not reach these
            reached = [parameter for parameter in self.parameters() if parameter.grad is not None]
            self._watch(reached or self._watched)

    def end_iteration(self) -> None:
        self._had_part, self._has_stepped = self._has_stepped, False
        if self._had_part:  # what is there now was used, or comes of another loss that ran back into these
            self._note_used()
            self.end()

    def end(self) -> None:
        """Backward passes are heard of no more."""
        self._hearing.end()

    def is_unused(self, *, is_part: bool) -> bool:
        """Whether there are gradients that came after the optimizer's last step, or the step of the run it was in."""
        if self._had_part and not is_part:
            return False
        has_run = self._hearing.count != self._heard_at_step or not _is_same(self._look(), self._at_step)
        gradients = (parameter.grad for parameter in self.parameters())
        return has_run and any(
            gradient.layout is not torch.strided or bool(local_of(gradient).any())
            for gradient in gradients
            if gradient is not None
        )

    def _look(self) -> _Sign:
        counts = [len(group["params"]) for group in self.optimizer.param_groups]
        if counts != self._counts or not all(parameter.requires_grad for parameter in self._watched):
            self._counts = counts
            self._watch([parameter for parameter in self.parameters() if parameter.requires_grad])
        return [_sign(parameter.grad) for parameter in self._watched]

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self._watched = _spread(parameters, _WATCHED)
        self._before = self._at_step = [None] * len(self._watched)


def _spread(parameters: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    if len(parameters) <= most:
        return list(parameters)
    return [parameters[i * (len(parameters) - 1) // (most - 1)] for i in range(most)]


def _sign(gradient: torch.Tensor | None) -> tuple[TensorWeakRef, int] | None:
    # The reference: memory and object of a gradient that was cleared are often those of the next one.
    return None if gradient is None else (TensorWeakRef(gradient), local_of(gradient)._version)


def _is_same(left: _Sign, right: _Sign) -> bool:
    return len(left) == len(right) and all(map(_is_same_gradient, left, right))


def _is_same_gradient(left: tuple[TensorWeakRef, int] | None, right: tuple[TensorWeakRef, int] | None) -> bool:
    if left is None or right is None:
        return left is right
    return left[1] == right[1] and left[0]() is right[0]()


class Gradients:
    """The gradients of the tracked optimizers' parameters."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._watches = {item.name: _Watch(item.optimizer) for item in tracked if item.optimizer is not None}
        self._of: dict[int, list[_Watch]] = {}
        for watch in self._watches.values():
            self._of.setdefault(id(watch.optimizer), []).append(watch)

    def begin(self) -> None:
        """Training begins: gradients that are there now belong to nobody."""
        for watch in self._watches.values():
            watch.begin()

    def have_changed(self) -> bool:
        """Whether a backward pass has run, or gradients were cleared, since this was asked before."""
        return sum(watch.has_changed() for watch in self._watches.values()) > 0

    def end(self) -> None:
        """The run ends: parameters are left as they were."""
        for watch in self._watches.values():
            watch.end()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use its gradients."""
        for watch in self._of.get(id(optimizer), ()):  # there may be one for each parameter
            watch.note_step()

    def end_iteration(self) -> None:
        """A step of the run is over. What an optimizer that stepped finds in its gradients now is left over."""
        for watch in self._watches.values():
            watch.end_iteration()

    def are_unused(self) -> bool:
        """Whether a backward pass has run since the last step of the run."""
        return any(watch.is_unused(is_part=True) for watch in self._watches.values())

    def pending(self, *, is_part: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Of each optimizer the gradients that wait for its step, by the number of the parameter.

        is_part:  in the middle of a step. After one, those of optimizers that had no part in it
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, watch in self._watches.items():
            if watch.is_unused(is_part=is_part):
                gradients = ((str(i), parameter.grad) for i, parameter in enumerate(watch.parameters()))
                found[name] = {number: local_of(value).detach() for number, value in gradients if value is not None}
        return found

    def restore(self, pending: dict[str, Any]) -> list[str]:
        """Give the parameters their gradients back. Returns what does not fit."""
        problems = []
        for name, gradients in pending.items():
            watch = self._watches.get(name)
            parameters = [] if watch is None else watch.parameters()
            for number, value in gradients.items():
                parameter = parameters[int(number)] if int(number) < len(parameters) else None
                if parameter is None or local_of(parameter).shape != value.shape:
                    problems.append(f"{name}: the gradient of parameter {number} does not fit and is lost")
                    continue
                local = value.to(device=parameter.device, dtype=parameter.dtype)
                parameter.grad = like(parameter, local) if is_distributed(parameter) else local
        return problems
