"""Batches and where in the data the run is. Knows nothing of checkpoints.

The public name is resolved on first use: the agent and the command line never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwell.training.data.loader import DataLoader

__all__ = ["DataLoader"]


def __getattr__(name: str) -> Any:
    if name != "DataLoader":
        raise AttributeError(f"module 'stepwell.training.data' has no attribute {name!r}")
    return import_module("stepwell.training.data.loader").DataLoader
