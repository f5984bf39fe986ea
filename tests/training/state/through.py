"""A state through its stored form in one process: leaves as bytes, the tree as JSON text."""

from __future__ import annotations

import json
from typing import Any

import torch

from stepwell.storage.format.tree import Path
from stepwell.training.state.flatten import dtype_from, flatten, unflatten
from tests.training.state.same import tensor_bytes


def round_trip(value: Any) -> Any:
    """What would come back. The leaves' bytes and the JSON text are all that is kept."""
    flat = flatten({"value": value})
    stored = {leaf.name: (tensor_bytes(leaf.tensor), leaf.dtype, tuple(leaf.tensor.shape)) for leaf in flat.leaves}
    text = json.dumps(flat.tree)
    leaves = {name: _tensor(*facts) for name, facts in stored.items()}
    return unflatten(json.loads(text), leaves.__getitem__)["value"]


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype_from(dtype))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype_from(dtype)).view(shape)


def names(value: Any) -> list[str]:
    """Names of the leaves of a state."""
    return [leaf.name for leaf in flatten({"value": value}).leaves]


def refuse(value: Any, path: Path) -> Any:
    """An `extern` that knows nothing."""
    return NotImplemented
