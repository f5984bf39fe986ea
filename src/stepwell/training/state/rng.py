"""Random generators of the process: Python, NumPy, torch on the CPU and on every CUDA device.

Captured as plain values and small tensors; restoring sets exactly what was captured and nothing else.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from stepwell.errors import DamagedError


def capture() -> dict[str, Any]:
    """State of all global generators. Does not advance any, does not wait for the device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = tuple(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check(state: Any) -> None:
    """Refuse what `restore` could not set, before anything is set. Raises DamagedError."""
    try:
        random.Random().setstate(_as_tuples(state["python"]))
        torch.Generator().set_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            numpy.random.RandomState().set_state(state["numpy"])
        if any(value.dtype != torch.uint8 for value in state.get("cuda", [])):
            raise TypeError("the state of a CUDA generator is not bytes")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"the state of the random generators is not valid: {error}") from error


def restore(state: dict[str, Any]) -> list[str]:
    """Set the generators back. Returns what could not be set on this machine."""
    left_out = []
    random.setstate(_as_tuples(state["python"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    saved = state.get("cuda", [])
    # Both are asked: NVML counts the devices of a driver that this torch cannot use.
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, value in enumerate(saved[:here]):
        torch.cuda.set_rng_state(value.cpu(), index)
    if len(saved) > here:
        left_out.append(f"CUDA generators: saved {len(saved)}, here are {here}")
    return left_out


def seed(value: int) -> None:
    """Set all global generators to a seed below 2**32."""
    random.seed(value)
    torch.manual_seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
