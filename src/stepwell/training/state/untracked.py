"""Optimizers that step without being tracked: what they keep is in no checkpoint.

Owns:    the hook that torch calls before the step of every optimizer of this process, while a run is open.
Holds:   one warning for each such optimizer that has parameters of a tracked module, a few at most; a step of one that
         was looked at costs a look into a set. Steps inside that of a tracked optimizer are that one's business.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stepwell.events.run_events import Event
from stepwell.training.state.tracked import Tracked

_MOST: Final = 8


@dataclass(frozen=True, kw_only=True)
class UntrackedOptimizer(Event):
    """Training goes on in an optimizer that the Checkpointer does not know."""

    level: ClassVar[int] = logging.WARNING
    optimizer: str
    module: str
    instead: str | None = None

    def text(self) -> str:
        made_later = (
            f". {self.instead}= has the same parameters: if this one replaces it, create a new "
            "Checkpointer with it, or nothing more is saved"
            if self.instead is not None
            else ""
        )
        return (
            f"{self.optimizer} steps parameters of {self.module}= but is not tracked: its state "
            "(momentum, step counts) is in no checkpoint. Pass it to the Checkpointer, "
            f"optimizer=...{made_later}"
        )


class Untracked:
    """Looks at the optimizers of one run's process."""

    def __init__(self, tracked: Sequence[Tracked], tell: Callable[[Event], None]) -> None:
        self._tracked, self._tell = tracked, tell
        self._is_within: Callable[[], bool] = lambda: False
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None
        self._left = _MOST

    def begin(self, is_within: Callable[[], bool]) -> None:
        """The run is open. `is_within`: a tracked optimizer is in its step."""
        self._is_within = is_within
        for item in self._tracked:
            known = (item.target, item.optimizer, item.zero)
            self._seen.update(each for each in known if isinstance(each, torch.optim.Optimizer))
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._look)

    def end(self) -> None:
        """The run is over."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def shares_with(self, other: Untracked) -> bool:
        """Whether both runs track one optimizer."""
        here = {id(item.optimizer) for item in self._tracked if item.optimizer is not None}
        return any(id(item.optimizer) in here for item in other._tracked)

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._seen or self._is_within():
            return
        holds_tracked = any(each in self._seen for each in vars(optimizer).values() if _is_optimizer(each))
        self._seen.add(optimizer)
        if holds_tracked or not self._left:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for item in self._tracked:
            if item.module is not None and any(id(parameter) in stepped for parameter in item.module.parameters()):
                self._left -= 1
                self._tell(
                    UntrackedOptimizer(
                        optimizer=type(optimizer).__qualname__, module=item.name, instead=self._replaced(stepped)
                    )
                )
                return

    def _replaced(self, stepped: set[int]) -> str | None:
        """The tracked optimizer that has these parameters too."""
        for item in self._tracked:
            if item.optimizer is not None:
                held = (parameter for group in item.optimizer.param_groups for parameter in group["params"])
                if any(id(parameter) in stepped for parameter in held):
                    return item.name
        return None


def _is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)
