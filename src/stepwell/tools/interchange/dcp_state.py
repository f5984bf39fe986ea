"""A checkpoint under the keys that torch.distributed.checkpoint (DCP) gives to a nested state dict.

Owns:    the keys (`model.layer.weight`, `optimizer.state.0.exp_avg`, `optimizer.param_groups.0.lr`), and what stands
         behind each: a tensor of the checkpoint, or a plain value.
Holds:   the keys are those that `dcp.save({"model": model.state_dict(), ...})` would have given: dictionaries are taken
         apart, and lists that hold dictionaries or tensors; all else is one value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stepwell.errors import DamagedError, StateError, StepwellError
from stepwell.restore.whole import Whole
from stepwell.storage.format.box import Box
from stepwell.tools.interchange.merged import tree_of
from stepwell.tools.interchange.outline import damage_if_malformed, key_text, tagged
from stepwell.tools.interchange.reading import Tensors, entries_of, is_run, open_checkpoint
from stepwell.tools.interchange.torch_file import as_tensor

if TYPE_CHECKING:
    import io

    import torch

__all__ = [
    "Behind",
    "Box",
    "FlatState",
    "flat_state",
    "give_optimizer",
    "is_run",
    "open_checkpoint",
    "own_errors",
    "tree_of",
]

Path = tuple[str | int, ...]
_MAPPINGS: Final = ("$dict", "$ordered", "$counter")


@dataclass(frozen=True)
class FlatState:
    """By key: the leaf of a tensor, the typed JSON of a plain value, and the path that the key was made of."""

    leaves: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def flat_state(encoded: Any, names: Mapping[str, Sequence[str]] | None = None) -> FlatState:
    """Take a typed tree apart. Raises DamagedError, or StateError if two places have one key.

    names:  of tracked optimizers: what to write for the numbers of their parameters
    """
    flat = FlatState()
    with damage_if_malformed():
        for key, item in _pairs(encoded) or ():
            _visit((key,), _named(item, names[key]) if names and key in names else item, flat)
    return flat


def _visit(path: Path, encoded: Any, flat: FlatState) -> None:
    pairs = _pairs(encoded)
    if pairs is not None:
        for key, item in pairs:
            _visit((*path, key), item, flat)
    elif isinstance(encoded, list) and not _is_value(encoded):
        for number, item in enumerate(encoded):
            _visit((*path, number), item, flat)
    else:
        key = ".".join(map(str, path))
        if key in flat.paths:
            raise StateError(f"two values of the state have the DCP key {key!r}; rename one of them", path=key)
        flat.paths[key] = path
        leaf = _leaf(encoded)
        if leaf is None:
            flat.values[key] = encoded
        else:
            flat.leaves[key] = leaf


def _pairs(encoded: Any) -> list[tuple[str, Any]] | None:
    """Keys, as text, and items of a dictionary of any kind. None: it is none."""
    if not isinstance(encoded, dict):
        return None
    tag, payload = tagged(encoded)
    if not tag.startswith("$"):
        return list(encoded.items())
    if tag in ("$state_dict", "$defaultdict"):
        payload = payload[0] if tag == "$state_dict" else payload[1]
    elif tag not in _MAPPINGS:
        return None
    return [(key_text(key), item) for key, item in payload]


def _is_value(items: list[Any]) -> bool:
    """Whether DCP stores a list as one value."""
    return not any(
        _pairs(item) is not None or _leaf(item) is not None or (isinstance(item, list) and not _is_value(item))
        for item in items
    )


def _leaf(encoded: Any) -> str | None:
    if not isinstance(encoded, dict):
        return None
    tag, payload = tagged(encoded)
    if tag != "$tensor":
        return None
    name = payload if isinstance(payload, str) else payload["leaf"]
    if not isinstance(name, str):
        raise DamagedError("the tree of values refers to a leaf without a name")
    return name


def _named(optimizer: Any, names: Sequence[str]) -> Any:
    """The state of an optimizer with names of parameters in the place of their numbers, as `get_state_dict` has it."""
    found = dict(_pairs(optimizer) or ())
    if "state" not in found or "param_groups" not in found:
        raise StateError("names= is for optimizers: this object has no state and param_groups")
    state = {names[int(key)]: item for key, item in _pairs(found["state"]) or ()}
    groups = [{**dict(_pairs(group) or ())} for group in found["param_groups"]]
    for group in groups:
        group["params"] = [names[number] for number in group["params"]]
    return {**found, "state": state, "param_groups": groups}


class Behind:
    """What stands behind the keys of a flat state, read when it is asked for."""

    def __init__(self, whole: Whole, flat: FlatState) -> None:
        self.whole = whole
        self.flat = flat
        self._entries = {entry.name: entry for entry in entries_of(whole, set(flat.leaves.values()))}
        self._tensors = Tensors(whole)

    def shape(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Element type and shape of a tensor."""
        from stepwell.training.state.flatten import dtype_from

        entry = self._entries[self.flat.leaves[key]]
        return dtype_from(entry.dtype), entry.shape

    def tensor(self, key: str) -> torch.Tensor:
        """A whole tensor, in host memory. Raises DamagedError."""
        return self._read(self.flat.leaves[key])

    def value(self, key: str) -> Any:
        """A plain value. Raises DamagedError, or StateError for one whose class is not loaded."""
        from stepwell.training.state.flatten import unflatten

        return unflatten(self.flat.values[key], self._read)

    def _read(self, name: str) -> torch.Tensor:
        (entry,) = [self._entries[name]] if name in self._entries else entries_of(self.whole, {name})
        return as_tensor(self._tensors.read(name, Box.whole(entry.shape)), entry)

    def saved_value(self, key: str) -> io.BytesIO:
        """A plain value in the bytes that a DCP planner takes."""
        import io

        import torch

        data = io.BytesIO()
        torch.save(self.value(key), data)
        data.seek(0)
        return data

    def fill(self, wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> int:
        """Fill tensors with boxes of what stands behind keys, by several threads; returns the bytes read."""
        from stepwell.restore.load import fill_boxes

        return fill_boxes(self.whole, [(self.flat.leaves[key], box, tensor) for key, box, tensor in wanted])

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()


def give_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give an optimizer its state, all of it in the types in which it was saved."""
    from stepwell.restore import load

    load.give_optimizer(optimizer, state)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """DCP wraps what went wrong on any rank: an error of ours comes out as it was."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for rank in sorted(error.failures):
            found = error.failures[rank][0]
            if isinstance(found, StepwellError):
                raise found from error
        raise
