"""What the benchmark asks of every way of saving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from peer import disk
from peer.workload import Workload


def nothing() -> None:
    """For rows that have nothing to wait for."""


@dataclass(frozen=True)
class Saved:
    """A save under way. `wait_staged` is called before the optimizer's next step, `wait_done` in another thread."""

    wait_done: Callable[[], Any] = nothing
    wait_staged: Callable[[], Any] = nothing


class Row:
    """Saves and loads one workload's state under `where`. Constructing imports and starts nothing."""

    label: ClassVar[str]
    is_async: ClassVar[bool] = False
    fsyncs: ClassVar[str] = "no"  # what the peer itself makes durable: "no", "data", "all"
    prepares: ClassVar[bool] = False  # gets memory ready in the background after opening

    def __init__(self, where: Path, work: Workload) -> None:
        self.where, self.work = where, work
        self.notes: list[str] = []

    def settle_seconds(self) -> float:
        """Training between opening and the first save: the same for all rows that use it to get memory ready."""
        if not self.prepares:
            return 1.0
        return 12.0 if self.work.is_cuda and self.work.state_bytes() > 2**32 else 4.0

    @classmethod
    def why_not(cls, device: str) -> str | None:
        """The reason why this row cannot run on that device."""
        return None

    @classmethod
    def before_training(cls, where: Path) -> None:
        """For peers that fork: called before torch has started threads or CUDA."""

    def open(self) -> None:
        """Get ready to save."""

    def close(self) -> None:
        """Give everything back."""

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Held around the optimizer's step."""
        return contextlib.nullcontext()

    def tick(self) -> None:
        """The end of an iteration that does not save."""

    def path(self, step: int) -> Path:
        """The file or folder of a checkpoint."""
        return self.where / f"step-{step}"

    def save(self, step: int) -> Saved:
        raise NotImplementedError

    def import_all(self) -> None:
        """Import what a load needs, before it is timed."""

    def load(self, step: int) -> None:
        """Fill the live tensors from this checkpoint. Raises if the peer refuses it."""
        raise NotImplementedError

    def peek(self, step: int) -> None:
        """Load an older checkpoint, to look at it."""
        self.load(step)

    def forget(self, step: int) -> None:
        """Remove a checkpoint; rows with a retention policy of their own do nothing."""
        disk.remove(self.path(step))

    def is_complete(self, step: int) -> bool:
        """A cheap look: may that checkpoint be whole?"""
        return self.path(step).exists()

    def facts(self) -> dict[str, Any]:
        """Figures that only this row knows."""
        return {}


@torch.no_grad()
def fill(live: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """Copy loaded tensors into the live ones."""
    for name, tensor in live.items():
        tensor.copy_(loaded[name].view(tensor.shape), non_blocking=True)
