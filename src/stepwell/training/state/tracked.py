"""The user's objects: anything with `state_dict`/`load_state_dict`, a generator, or a plain tree that can be refilled.

Owns:    how an object's state is asked for and given back.
Holds:   asking never changes the object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from stepwell.errors import ConfigError
from stepwell.training.state.shards import unwrapped, zero_of


@dataclass(frozen=True)
class Tracked:
    """One tracked object under the name the user picked."""

    name: str
    target: Any

    @property
    def module(self) -> torch.nn.Module | None:
        """The target as a module, if it is one."""
        return self.target if isinstance(self.target, torch.nn.Module) else None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The target as an optimizer with step hooks, if it is one; of ZeRO the one that steps this rank's part, of a
        wrapper (accelerate's AcceleratedOptimizer) the one inside.
        """
        return optimizer_in(self.target if self.zero is None else self.zero.optim)

    @property
    def zero(self) -> Any:
        """The target as an optimizer whose state is spread over the ranks, each parameter's on one of them."""
        return zero_of(self.target)

    def state(self) -> Any:
        """The object's state: live tensors and plain values."""
        if isinstance(self.target, torch.Generator):
            return self.target.get_state()
        if isinstance(self.target, dict | list):
            return self.target
        return self.target.state_dict() if self.zero is None else self.zero.optim.state_dict()

    def load(self, state: Any) -> None:
        """Give a state back to the object."""
        if isinstance(self.target, torch.Generator):
            self.target.set_state(state.cpu())
        elif isinstance(self.target, dict):
            self.target.clear()
            self.target.update(state)
        elif isinstance(self.target, list):
            self.target[:] = state
        elif self.zero is not None:
            self.zero.optim.load_state_dict(state)
            # Its next step would overwrite the inner groups (rates and the like) with the outer ones.
            for outer, inner in zip(self.zero.param_groups, self.zero.optim.param_groups, strict=True):
                outer.update({key: value for key, value in inner.items() if key != "params"})
        else:
            self.target.load_state_dict(state)


def optimizer_in(target: Any) -> torch.optim.Optimizer | None:
    """The optimizer that steps when the target does: the target, or what it wraps. None: it is no optimizer.

    Raises ConfigError for an optimizer whose steps cannot be seen.
    """
    is_optimizer = isinstance(target, torch.optim.Optimizer)
    if is_optimizer and "_optimizer_step_pre_hooks" in vars(target):
        return cast("torch.optim.Optimizer", target)
    if not is_optimizer and (isinstance(target, torch.nn.Module) or not _acts_as_optimizer(target)):
        return None
    held = [value for value in vars(target).values() if value is not target and _acts_as_optimizer(value)]
    found = {id(inner): inner for value in held if (inner := optimizer_in(value)) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if not is_optimizer:
        return None  # one of the user's own: `updating()` and `step()` are for it
    kind = type(target).__qualname__
    raise ConfigError(
        f"stepwell cannot see the steps of {kind}: it contains {len(found)} optimizers, and its "
        "__init__ does not call torch.optim.Optimizer's; call it, or track the optimizer that steps "
        "the parameters",
        found=kind,
    )


def _acts_as_optimizer(target: Any) -> bool:
    try:
        return hasattr(target, "__dict__") and callable(target.step) and isinstance(target.param_groups, list)
    except Exception:  # what a property of the user's raises
        return False


def hook(tracked: Sequence[Tracked], before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Have calls made before and after every step of a tracked optimizer."""
    optimizers = list({id(found): found for item in tracked if (found := item.optimizer) is not None}.values())
    handles = [optimizer.register_step_pre_hook(before) for optimizer in optimizers]
    return handles + [optimizer.register_step_post_hook(after) for optimizer in optimizers]


def track(objects: dict[str, Any]) -> list[Tracked]:
    """Check and wrap the user's objects. Raises ConfigError naming the one that cannot be tracked."""
    out = []
    for name, target in objects.items():
        if isinstance(target, type):
            raise ConfigError(f"{name}= is the class {target.__qualname__}; track an object of it", name=name)
        has_state = callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))
        if not (has_state or isinstance(target, torch.Generator | dict | list)):
            raise ConfigError(
                f"{name}= is a {type(target).__qualname__}, which has no state_dict and load_state_dict; "
                "track an object that has both, a torch.Generator, a dict or a list",
                name=name,
            )
        if name == "stepwell":
            raise ConfigError("the name 'stepwell' is reserved for the run's own state; pick another one", name=name)
        out.append(Tracked(name, unwrapped(target)))
    return out
