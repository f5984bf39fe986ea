"""stepwell: checkpoints for PyTorch training that are taken while it runs, outlive it, and resume to the same bits.

The names below are the public surface. They are resolved on first use, so that the agent and the command line never
load torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(f"stepwell runs on Linux only (memfd, pidfd, SCM_RIGHTS); this is {sys.platform}")

if TYPE_CHECKING:
    from stepwell.checkpointer import Checkpointer
    from stepwell.errors import (
        AgentError,
        ConfigError,
        DamagedError,
        DataError,
        FencedError,
        GroupError,
        PersistError,
        RestoreError,
        StateError,
        StepwellError,
    )
    from stepwell.levels.level_spec import Node, Pairs, Partner, ReedSolomon, Shared, Single, Xor
    from stepwell.storage.codecs.assignment import Deltas
    from stepwell.storage.codecs.codec_spec import LC, Hold, Ternary, Uniform
    from stepwell.training.data.loader import DataLoader
    from stepwell.training.loop.save_handle import SaveHandle
    from stepwell.training.policy.auto import Auto
    from stepwell.training.policy.every import Every, Never
    from stepwell.types import Keep, Status

__version__ = "0.1.0"

_HOMES = {
    "AgentError": "errors",
    "Auto": "training.policy.auto",
    "Checkpointer": "checkpointer",
    "ConfigError": "errors",
    "DamagedError": "errors",
    "DataError": "errors",
    "DataLoader": "training.data.loader",
    "Deltas": "storage.codecs.assignment",
    "Every": "training.policy.every",
    "FencedError": "errors",
    "GroupError": "errors",
    "Hold": "storage.codecs.codec_spec",
    "Keep": "types",
    "LC": "storage.codecs.codec_spec",
    "Never": "training.policy.every",
    "Node": "levels.level_spec",
    "Pairs": "levels.level_spec",
    "Partner": "levels.level_spec",
    "PersistError": "errors",
    "ReedSolomon": "levels.level_spec",
    "RestoreError": "errors",
    "SaveHandle": "training.loop.save_handle",
    "Shared": "levels.level_spec",
    "Single": "levels.level_spec",
    "StateError": "errors",
    "Status": "types",
    "StepwellError": "errors",
    "Ternary": "storage.codecs.codec_spec",
    "Uniform": "storage.codecs.codec_spec",
    "Xor": "levels.level_spec",
}

__all__ = [
    "AgentError",
    "Auto",
    "Checkpointer",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DataLoader",
    "Deltas",
    "Every",
    "FencedError",
    "GroupError",
    "Hold",
    "Keep",
    "LC",
    "Never",
    "Node",
    "Pairs",
    "Partner",
    "PersistError",
    "ReedSolomon",
    "RestoreError",
    "SaveHandle",
    "Shared",
    "Single",
    "StateError",
    "Status",
    "StepwellError",
    "Ternary",
    "Uniform",
    "Xor",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    return getattr(import_module(f"stepwell.{home}"), name)


def __dir__() -> list[str]:
    return __all__
