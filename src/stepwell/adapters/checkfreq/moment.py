"""Whether what a checkpoint holds is as it was at another moment of the same process, without a copy of it.

Tensors are known by their address and the counter that torch keeps of changes in place; arrays by a hash; everything
else by its value.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class StateMoment:
    """Tracked objects, and the global random generators, as they are when it is made."""

    def __init__(self, targets: Iterable[Any]) -> None:
        self._facts = [_facts(target) for target in targets], _generators()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateMoment) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


def _facts(target: Any) -> Any:
    if isinstance(target, torch.nn.Module):
        return [_plain(tensor) for tensor in (*target.parameters(), *target.buffers())]
    if isinstance(target, torch.optim.Optimizer):
        return [_plain(list(target.state.values())), _plain(target.param_groups)]
    return _plain(target.state_dict())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.layout is torch.strided else id(value), value._version
    if isinstance(value, dict):
        return {repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(getattr(value, "tobytes", None)):  # an array: numpy leaves most of a large one out of its text
        return str(getattr(value, "dtype", "")), hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    return repr(value)


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    parts = () if numpy is None else numpy.random.get_state()
    in_numpy = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return random.getstate(), in_numpy, [state.tolist() for state in (torch.get_rng_state(), *on_devices)]
