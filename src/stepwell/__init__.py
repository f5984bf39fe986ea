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
    from stepwell.codecs.layout import Deltas
    from stepwell.codecs.spec import LC, Hold, Ternary, Uniform
    from stepwell.data.loader import DataLoader
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
    from stepwell.levels.spec import Node, Pairs, Partner, ReedSolomon, Shared, Single, Xor
    from stepwell.policy.auto import Auto
    from stepwell.policy.every import Every, Never
    from stepwell.snapshot.uploads import SaveHandle
    from stepwell.types import Keep, Status

__version__ = "0.1.0"

_HOMES = {
    "AgentError": "errors",
    "Auto": "policy.auto",
    "Checkpointer": "checkpointer",
    "ConfigError": "errors",
    "DamagedError": "errors",
    "DataError": "errors",
    "DataLoader": "data.loader",
    "Deltas": "codecs.layout",
    "Every": "policy.every",
    "FencedError": "errors",
    "GroupError": "errors",
    "Hold": "codecs.spec",
    "Keep": "types",
    "LC": "codecs.spec",
    "Never": "policy.every",
    "Node": "levels.spec",
    "Pairs": "levels.spec",
    "Partner": "levels.spec",
    "PersistError": "errors",
    "ReedSolomon": "levels.spec",
    "RestoreError": "errors",
    "SaveHandle": "snapshot.uploads",
    "Shared": "levels.spec",
    "Single": "levels.spec",
    "StateError": "errors",
    "Status": "types",
    "StepwellError": "errors",
    "Ternary": "codecs.spec",
    "Uniform": "codecs.spec",
    "Xor": "levels.spec",
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
