"""What a checkpoint of CheckFreq's interface holds: the tracked objects, and beside them what the manager keeps.

Owns:    CFCheckpoint, and the values that are saved under a name of their own.
Not:     when it is saved, and where (the manager).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import stepwell

if TYPE_CHECKING:
    from stepwell.adapters.checkfreq import CFManager

BESIDE = "checkfreq"
"""The name under which the manager's own values are tracked."""


class CFCheckpoint:
    """What is to be saved: every argument with a `state_dict`, under the name it is given."""

    def __init__(self, **kwargs: Any) -> None:
        self.tracking_map: dict[str, Any] = {}
        for name, target in kwargs.items():
            if callable(getattr(target, "state_dict", None)):
                self.tracking_map[name] = target
            else:
                warnings.warn(
                    f"CFCheckpoint({name}=...): a {type(target).__qualname__} has no state_dict, so it is not saved; "
                    "give it one, or pass its value to save(additional_snapshot=...)",
                    stacklevel=2,
                )
        self.num_tracking = len(self.tracking_map)
        if not self.tracking_map:
            raise stepwell.ConfigError("CFCheckpoint: none of the arguments has a state_dict; pass model=, optimizer=")
        if BESIDE in self.tracking_map:
            raise stepwell.ConfigError(f"CFCheckpoint: the name {BESIDE!r} is taken; pick another one", name=BESIDE)

    @property
    def optimizers(self) -> dict[str, Any]:
        """What can be stepped: schedulers step too, but have no parameters of their own."""
        found = self.tracking_map.items()
        return {name: one for name, one in found if hasattr(one, "param_groups") and callable(getattr(one, "step", 0))}

    @property
    def is_hooked(self) -> bool:
        """Whether the Checkpointer sees the steps by itself: it hooks torch's optimizers only."""
        return any(isinstance(one, torch.optim.Optimizer) for one in self.optimizers.values())


class Beside:
    """What is saved beside the tracked objects. Asked while a snapshot is taken, so it is of the same moment."""

    def __init__(self) -> None:
        self.manager: CFManager | None = None
        self.given: dict[str, Any] | None = None
        self.position: dict[str, Any] | None = None
        self.ends: dict[int, int] = {}
        self._ending: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """As it is saved: the user's map, the position in the data, and at which step each epoch ended."""
        position = self.position if self.manager is None else self.manager.ask_position(self.position)
        if self._ending is not None and self.manager is not None:
            self.ends[self._ending] = self.manager.step
        return {"given": self.given, "position": position, "ends": dict(self.ends)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what was saved."""
        self.given, self.position, self.ends = state["given"], state["position"], dict(state["ends"])

    @contextlib.contextmanager
    def during(self, given: dict[str, Any] | None, ending: int | None) -> Iterator[None]:
        """A save that somebody asked for; what was given with it belongs to this checkpoint only."""
        self.given, self._ending = given, ending
        try:
            yield
        finally:
            self.given, self._ending = None, None
