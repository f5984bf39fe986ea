"""Verified bytes into live torch objects.

Owns:    which live tensor each leaf goes into, and the comparison of a checkpoint with the live objects.
Holds:   modules and optimizers are filled in place, so there is never a second copy of the state; every mismatch is
         listed by name in one error before any byte is read; a record is not believed: what it says of the values is
         checked before any object is given its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stepwell.errors import DamagedError, StateError, listing
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.restore.place import Placing
from stepwell.restore.read import Source, read_record_leaves
from stepwell.state import rng
from stepwell.state.flatten import dtype_from, dtype_name, flatten, unflatten
from stepwell.state.tracked import Tracked

_DEVICE_GRAIN: Final = 512
"""torch hands out device memory in multiples of this,"""
_POOLED_BYTES: Final = 1 << 20
"""and up to this size from pools of their own."""


@dataclass(frozen=True)
class Loaded:
    """What came back: the run's own state, what did not fit (strict=False), and how many bytes were read."""

    own: Any
    problems: list[str]
    nbytes: int


def load_record(
    record: Record,
    open_source: Callable[[FileEntry], Source],
    tracked: Sequence[Tracked],
    *,
    only: set[str] | None,
    strict: bool,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Loaded:
    """Fill the live objects from a checkpoint. Raises StateError (mismatch) or DamagedError (bytes).

    check:  told the run's own state (its generators are not read yet) before anything is changed; may refuse it
    """
    try:
        if check is not None:
            check(_own_values(record))
        return _load(record, open_source, tracked, only, strict)
    except DamagedError as error:
        if "path" in error.fields:
            raise
        path = f"{record.id}/{record.owner.stem}.json"
        raise DamagedError(f"{path}: {error}", **{**error.fields, "path": path}) from error


def _load(
    record: Record,
    open_source: Callable[[FileEntry], Source],
    tracked: Sequence[Tracked],
    only: set[str] | None,
    strict: bool,
) -> Loaded:
    if not isinstance(record.tree, dict) or "stepwell" not in record.tree:
        raise DamagedError("the tree of values lacks the run's own state")
    chosen = [item for item in tracked if only is None or item.name in only]
    fit = _Fit(record, chosen, only)
    if fit.problems and strict:
        raise StateError(
            f"the checkpoint of step {record.id.step} does not fit the tracked objects:\n{listing(fit.problems)}\n"
            "restore(strict=False) restores what fits and reports the rest",
            step=record.id.step,
            problems=fit.problems,
        )
    names = [item.name for item in chosen if item.name in record.tree]
    trees = {name: record.tree[name] for name in [*names, *([] if only is not None else ["stepwell"])]}
    wanted = {name for tree in trees.values() for name in _leaf_names(tree)}
    targets = fit.targets([entry for entry in record.leaves if entry.name in wanted])
    missing = wanted - targets.keys()
    if missing:
        raise DamagedError(f"the record lacks leaf {min(missing)!r}")
    with Placing(targets, fit.fresh) as placing:
        nbytes = read_record_leaves(record, open_source, None if only is None else wanted, placing)
    state = {name: unflatten(tree, targets.__getitem__) for name, tree in trees.items()}
    own = state.get("stepwell")
    if own is not None:
        _check_own(own, record)
    for item in chosen:
        if item.name in state:
            _give(item, state[item.name], fit, strict=strict)
    return Loaded(own, fit.problems, nbytes)


def _own_values(record: Record) -> dict[str, Any]:
    own = record.tree.get("stepwell") if isinstance(record.tree, dict) else None
    if not isinstance(own, dict):
        raise DamagedError("the tree of values lacks the run's own state")
    _check_values(own, record)
    return own


def _check_own(own: Any, record: Record) -> None:
    """The run's own state goes to counters and generators, which would not look at it."""
    if not isinstance(own, dict):
        raise DamagedError("the run's own state is no table")
    _check_values(own, record)
    rng.check(own.get("rng"))


def _check_values(own: dict[str, Any], record: Record) -> None:
    if own.get("step") != record.id.step or type(own.get("finished")) is not bool:
        raise DamagedError("the run's own state does not belong to this step")
    data = own.get("data", {})  # older ones have none
    if not isinstance(data, dict):
        raise DamagedError(f"the run's own state has {data!r} as data")
    for place, name in ((own, "epoch"), (own, "consumed"), (data, "samples"), (data, "length")):
        value = place.get(name)
        is_missing = place is data and value is None  # the source counts batches only
        if not is_missing and (type(value) is not int or not 0 <= value < 1 << 62):
            raise DamagedError(f"the run's own state has {value!r} as {name}")


def _leaf_names(tree: Any) -> list[str]:
    """Names of all leaves a typed tree refers to."""
    found: list[str] = []
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            if len(value) == 1 and ("$tensor" in value or "$ndarray" in value):
                payload = next(iter(value.values()))
                name = (
                    payload if isinstance(payload, str) else payload.get("leaf") if isinstance(payload, dict) else None
                )
                if not isinstance(name, str):
                    raise DamagedError("the tree of values refers to a leaf without a name")
                found.append(name)
            else:
                pending.extend(value.values())
    return found


def _keys(tree: Any) -> dict[str, str | None]:
    """Keys of a module's saved state dict, each with the leaf behind it (None: not a tensor)."""
    found: dict[str, str | None] = {}
    try:
        if len(tree) == 1 and next(iter(tree)).startswith("$"):
            payload = next(iter(tree.values()))
            pairs = payload[0] if "$state_dict" in tree else payload
        else:
            pairs = list(tree.items())
        for key, value in pairs:
            names = _leaf_names(value) if isinstance(value, dict) and "$tensor" in value else []
            found[str(key)] = names[0] if names else None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DamagedError(f"the saved state of a module is no state dict: {error}") from error
    return found


class _Fit:
    """Compares a record with the live objects and finds the live tensor for each leaf."""

    def __init__(self, record: Record, tracked: Sequence[Tracked], only: set[str] | None) -> None:
        self.problems: list[str] = []
        self.live: dict[str, torch.Tensor] = {}
        self.skipped: set[str] = set()
        self.fresh: set[str] = set()
        saved = {entry.name: entry for entry in record.leaves}
        names = {item.name for item in tracked}
        for name in sorted((only or set()) - names):
            self.problems.append(f"{name}: asked for with only=, but not tracked")
        if only is None:
            for name in sorted(set(record.tree) - names - {"stepwell"}):
                self.problems.append(f"{name}: in the checkpoint, but not tracked")
        for item in tracked:
            if item.name not in record.tree:
                self.problems.append(f"{item.name}: tracked, but not in the checkpoint")
            elif item.module is not None:
                self._module(item, saved, record.tree[item.name])
            elif item.optimizer is not None:
                self._optimizer(item)

    def _optimizer(self, item: Tracked) -> None:
        """State that exists already is filled in place; what is created at the first step comes fresh."""
        self.live.update({leaf.name: leaf.tensor for leaf in flatten({item.name: item.state()}).leaves})

    def _module(self, item: Tracked, saved: dict[str, LeafEntry], tree: Any) -> None:
        """Compare key by key: what is tied in one place and not in the other still fits."""
        stored = _keys(tree)
        live = {key: value for key, value in item.state().items() if isinstance(value, torch.Tensor)}
        label = f"{item.name}/{{}}".format
        self.problems += [f"{label(key)}: missing in the checkpoint" for key in live if key not in stored]
        for key, name in stored.items():
            if name is None:
                continue
            tensor, entry = live.get(key), saved.get(name)
            if tensor is None:
                self.problems.append(f"{label(key)}: unexpected, the live module has no such tensor")
            elif entry is not None and tuple(tensor.shape) != entry.shape:
                self.problems.append(f"{label(key)}: shape {entry.shape} in the checkpoint, {tuple(tensor.shape)} live")
                self.skipped.add(label(key))
            elif entry is not None and tensor.dtype != dtype_from(entry.dtype):
                self.problems.append(f"{label(key)}: {entry.dtype} in the checkpoint, {dtype_name(tensor.dtype)} live")
            else:
                self.live.setdefault(name, tensor.detach())

    def targets(self, entries: Sequence[LeafEntry]) -> dict[str, torch.Tensor]:
        """For each leaf the live tensor where it fits byte for byte, else a fresh one. Raises DamagedError."""
        found = {entry.name: self._live(entry) for entry in entries}
        fresh = [entry for entry in entries if found[entry.name] is None]
        devices = {entry.name: _device(entry.device) for entry in fresh}
        _reserve([(devices[entry.name], entry.end - entry.start) for entry in fresh])
        self.fresh = set(devices)
        made = {
            entry.name: torch.empty(entry.shape, dtype=dtype_from(entry.dtype), device=devices[entry.name])
            for entry in fresh
        }
        return {name: made[name] if live is None else live for name, live in found.items()}

    def _live(self, entry: LeafEntry) -> torch.Tensor | None:
        live = self.live.get(entry.name)
        if live is None or tuple(live.shape) != entry.shape or live.dtype != dtype_from(entry.dtype):
            return None
        return live if live.is_contiguous() and not live.is_conj() and not live.is_neg() else None


def _reserve(sizes: Sequence[tuple[torch.device, int]]) -> None:
    """Ask the driver once for the memory of all fresh leaves: torch keeps it and cuts the leaves out of it.

    Hundreds of leaves that each ask for themselves take longer than their bytes.
    """
    for device in {device for device, _ in sizes if device.type == "cuda"}:
        large = [size for at, size in sizes if at == device and size > _POOLED_BYTES]
        nbytes = sum(-(-size // _DEVICE_GRAIN) * _DEVICE_GRAIN for size in large)
        if nbytes > torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device):
            with contextlib.suppress(torch.OutOfMemoryError):  # in one piece: single leaves may still find room
                torch.empty(nbytes, dtype=torch.uint8, device=device)


def _device(text: str) -> torch.device:
    """The device a leaf came from, or the nearest there is here."""
    kind, _, index = text.partition(":")
    if kind != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(text if int(index or 0) < torch.cuda.device_count() else "cuda")


def _put_back(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """torch casts optimizer state to the type of its parameter: what was saved in another type comes back as it was."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(saved, live, strict=True):
        for key, value in state["state"].get(number, {}).items():
            found = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(found.device)


def _give(item: Tracked, state: Any, fit: _Fit, *, strict: bool) -> None:
    try:
        if item.module is not None and not strict:
            for key in [key for key in state if f"{item.name}/{key}" in fit.skipped]:
                del state[key]
            item.module.load_state_dict(state, strict=False)
        else:
            item.load(state)
            if item.optimizer is not None:
                _put_back(item.optimizer, state)
    except Exception as error:  # the user's code: whatever it says is about this checkpoint and that object
        raise StateError(f"{item.name}: load_state_dict refused the checkpoint: {error}", name=item.name) from error
