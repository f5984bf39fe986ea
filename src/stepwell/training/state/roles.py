"""How each leaf may be copied, and what it is.

Owns:    the three kinds of protection (design, "Snapshot"):
         managed   an optimizer changes it, in its step and nowhere else: copied while forward and backward run
         frozen    a parameter without gradient that no optimizer has: copied once, stored by reference while unchanged
         loose     everything else: cloned at the trigger
Holds:   what is not known to be managed or frozen is loose. Loose is always right, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stepwell.training.state.flatten import Leaf
from stepwell.training.state.shards import local_of
from stepwell.training.state.tracked import Tracked

Protection = Literal["managed", "frozen", "loose"]
_MOMENTS = {"exp_avg": "moment1", "momentum_buffer": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2"}
_Key = tuple[torch.device, int, int]


@dataclass(frozen=True)
class Role:
    """Protection, meaning for the codecs, and the way to the live tensor (None where the leaf itself is it)."""

    protection: Protection
    meaning: str
    live: Callable[[], torch.Tensor | None]


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.device, tensor.data_ptr(), tensor.numel()


class Owners:
    """Which tensors the optimizers and modules hold, as they are when it is made."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self.managed = _managed(tracked)
        self.frozen = _frozen(tracked)
        self.kinds = {item.name: "buffer" if item.module is not None else "value" for item in tracked}


def assign_roles(leaves: Sequence[Leaf], owners: Owners, not_frozen: Container[str]) -> list[Role]:
    """The role of each leaf. `not_frozen`: leaves that were seen to change and are not to be trusted as frozen."""
    managed, frozen, kinds = owners.managed, owners.frozen, owners.kinds
    roles = []
    for leaf in leaves:
        key, is_empty = _key(leaf.local), not leaf.local.numel()
        if not is_empty and key in managed:
            meaning, live = managed[key]
            roles.append(Role("managed", meaning, live))
        elif not is_empty and key in frozen and leaf.name not in not_frozen:
            roles.append(Role("frozen", "parameter", _reference(frozen[key])))
        else:
            meaning = "rng" if leaf.path[0] == "stepwell" else kinds.get(leaf.path[0], "value")
            roles.append(Role("loose", meaning, _reference(leaf.tensor)))
    return roles


def _managed(tracked: Sequence[Tracked]) -> dict[_Key, tuple[str, Callable[[], torch.Tensor | None]]]:
    found: dict[_Key, tuple[str, Callable[[], torch.Tensor | None]]] = {}
    for optimizer in (item.optimizer for item in tracked):
        if optimizer is None:
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = local_of(parameter)
                found[_key(local)] = ("parameter", _reference(parameter))
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    found[_key(local_of(value))] = (_MOMENTS.get(name, "optimizer"), _entry(state, name))
    return found


def _frozen(tracked: Sequence[Tracked]) -> dict[_Key, torch.Tensor]:
    return {
        _key(local_of(parameter)): local_of(parameter)
        for item in tracked
        if item.module is not None
        for parameter in item.module.parameters()
        if not parameter.requires_grad
    }


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return lambda: tensor


def _entry(state: dict[str, object], name: str) -> Callable[[], torch.Tensor | None]:
    def live() -> torch.Tensor | None:
        value = state.get(name)
        return local_of(value) if isinstance(value, torch.Tensor) else None

    return live
