"""Verified bytes into live torch objects.

Owns:    which live tensor each leaf goes into, and the comparison of a checkpoint with the live objects.
Holds:   modules and optimizers are filled in place, so there is never a second copy of the state; every mismatch is
         listed by name in one error before any byte is read; a record is not believed: what it says of the values is
         checked before any object is given its state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stepwell.errors import DamagedError, StateError, listing
from stepwell.format import dtypes
from stepwell.format.box import Box
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.restore.place import Placing
from stepwell.restore.read import Source, read_record_leaves, read_some
from stepwell.restore.whole import Part, Whole
from stepwell.state import rng
from stepwell.state.distributed import is_distributed, like, local_of, part_of
from stepwell.state.flatten import dtype_from, dtype_name, flatten, leaf_name, unflatten
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
    """`load` of a checkpoint of one rank."""
    return load([Part(record, open_source)], tracked, only=only, strict=strict, check=check)


def load(
    parts: Sequence[Part],
    tracked: Sequence[Tracked],
    *,
    mine: int | None = 0,
    only: set[str] | None,
    strict: bool,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Loaded:
    """Fill the live objects from a checkpoint. Raises StateError (mismatch) or DamagedError (bytes).

    mine:   the part whose values, and leaves of a rank's own, are restored; None: another number of ranks saved it
    check:  told the run's own state (its generators are not read yet) before anything is changed; may refuse it
    """
    record = parts[mine or 0].record
    try:
        if check is not None:
            check(_own_values(record))
        return _load(Whole(parts, mine), tracked, only, strict)
    except DamagedError as error:
        if "path" in error.fields:
            raise
        path = f"{record.id}/{record.owner.stem}.json"
        raise DamagedError(f"{path}: {error}", **{**error.fields, "path": path}) from error


def _load(whole: Whole, tracked: Sequence[Tracked], only: set[str] | None, strict: bool) -> Loaded:
    record = whole.record
    if not isinstance(record.tree, dict) or "stepwell" not in record.tree:
        raise DamagedError("the tree of values lacks the run's own state")
    chosen = [item for item in tracked if only is None or item.name in only]
    fit = _Fit(whole, chosen, only)
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
    missing = wanted - whole.leaves.keys()
    if missing:
        raise DamagedError(f"the record lacks leaf {min(missing)!r}")
    targets = fit.targets([entry for name, entry in whole.leaves.items() if name in wanted])
    nbytes = _read(whole, targets, is_all=only is None)
    state = {name: unflatten(tree, lambda leaf: targets[leaf].given) for name, tree in trees.items()}
    own = state.get("stepwell")
    if own is not None:
        _check_own(own, record)
    for item in chosen:
        if item.name in state:
            _give(item, state[item.name], fit, strict=strict)
    return Loaded(own, fit.problems, nbytes)


def _read(whole: Whole, targets: dict[str, Target], *, is_all: bool) -> int:
    """Fill the targets. Returns the bytes read."""
    if whole.is_single and all(target.is_whole for target in targets.values()):
        (part,) = whole.parts
        fresh = {name for name, target in targets.items() if target.is_fresh}
        with Placing({name: target.tensor for name, target in targets.items()}, fresh) as placing:
            return read_record_leaves(part.record, part.open_source, None if is_all else set(targets), placing)
    total = 0
    for part, fetches in whole.plan({name: target.box for name, target in targets.items()}):
        rooms, late = {}, []
        for fetch in fetches:
            target = targets[fetch.entry.name]
            place = target.tensor[_slices(fetch.target)]
            if fetch.is_whole and place.is_contiguous():
                rooms[fetch.entry.name] = place
                continue
            room = torch.empty(fetch.entry.shape, dtype=place.dtype, device=place.device)
            rooms[fetch.entry.name] = room
            late.append((place, room[_slices(fetch.needed)]))
        with Placing(rooms, {name for name in rooms if targets[name].is_fresh}) as placing:
            total += read_some(part.record, part.open_source, [fetch.entry for fetch in fetches], placing)
        for place, room in late:
            place.copy_(room)
    return total


def fill_boxes(whole: Whole, wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> int:
    """Fill tensors, of any type and strides, with boxes of leaves. Returns the bytes read. Raises DamagedError."""
    total, waiting = 0, list(wanted)
    while waiting:
        targets: dict[str, Target] = {}
        late, later = [], []
        for name, box, tensor in waiting:
            if name in targets:  # another box of the same leaf, or the same one for a second place
                later.append((name, box, tensor))
                continue
            entry = whole.leaves[name]
            room = tensor.detach()
            if not room.is_contiguous() or room.dtype != dtype_from(entry.dtype):
                room = torch.empty(box.shape, dtype=dtype_from(entry.dtype), device=tensor.device)
                late.append((tensor.detach(), room))
            targets[name] = Target(room, box, room, is_fresh=False, is_whole=box.shape == entry.global_shape)
        total += _read(whole, targets, is_all=False)
        for tensor, room in late:
            tensor.copy_(room)
        waiting = later
    return total


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.shape, strict=True))


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


@dataclass(frozen=True)
class Target:
    """Where a leaf goes: memory for the box of it that belongs here, and what the object is given in the end."""

    tensor: torch.Tensor
    box: Box
    given: torch.Tensor
    is_fresh: bool
    is_whole: bool


class _Fit:
    """Compares a checkpoint with the live objects and finds the live tensor for each leaf."""

    def __init__(self, whole: Whole, tracked: Sequence[Tracked], only: set[str] | None) -> None:
        self.problems: list[str] = whole.bound_to_ranks()
        self.live: dict[str, torch.Tensor] = {}
        self.skipped: set[str] = set()
        self._like: dict[str, list[torch.Tensor]] = {}
        saved, tree = whole.leaves, whole.record.tree
        names = {item.name for item in tracked}
        for name in sorted((only or set()) - names):
            self.problems.append(f"{name}: asked for with only=, but not tracked")
        if only is None:
            for name in sorted(set(tree) - names - {"stepwell"}):
                self.problems.append(f"{name}: in the checkpoint, but not tracked")
        for item in tracked:
            if item.name not in tree:
                self.problems.append(f"{item.name}: tracked, but not in the checkpoint")
            elif item.module is not None:
                self._module(item, saved, tree[item.name])
            elif item.zero is not None and item.zero.world_size != len(whole.parts):
                self.problems.append(
                    f"{item.name}: ZeRO's state was saved by {len(whole.parts)} ranks, these are {item.zero.world_size}"
                )
            elif item.optimizer is not None:
                self._optimizer(item, item.optimizer)

    def _optimizer(self, item: Tracked, optimizer: torch.optim.Optimizer) -> None:
        """State that exists already is filled in place; what is created at the first step comes fresh."""
        leaves = flatten({item.name: item.state()}).leaves
        self.live.update({leaf.name: leaf.local if leaf.origin is None else leaf.origin for leaf in leaves})
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(map(is_distributed, parameters)):
            self._like[leaf_name((item.name, "state"))] = parameters

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
            elif entry is not None and tuple(tensor.shape) != entry.global_shape:
                found = f"{entry.global_shape} in the checkpoint, {tuple(tensor.shape)} live"
                self.problems.append(f"{label(key)}: shape {found}")
                self.skipped.add(label(key))
            elif entry is not None and tensor.dtype != dtype_from(entry.dtype):
                self.problems.append(f"{label(key)}: {entry.dtype} in the checkpoint, {dtype_name(tensor.dtype)} live")
            else:
                self.live.setdefault(name, tensor.detach())

    def targets(self, entries: Sequence[LeafEntry]) -> dict[str, Target]:
        """For each leaf the live tensor where it fits byte for byte, else a fresh one. Raises DamagedError."""
        found = {entry.name: self._live(entry) for entry in entries}
        fresh = [entry for entry in entries if found[entry.name] is None]
        devices = {entry.name: _device(entry.device) for entry in fresh}
        sizes = {entry.name: self._fresh_size(entry) for entry in fresh}
        _reserve([(devices[name], nbytes) for name, nbytes in sizes.items()])
        made = {entry.name: self._fresh(entry, devices[entry.name]) for entry in fresh}
        return {name: made[name] if live is None else live for name, live in found.items()}

    def _live(self, entry: LeafEntry) -> Target | None:
        live = self.live.get(entry.name)
        if live is None or tuple(live.shape) != entry.global_shape or live.dtype != dtype_from(entry.dtype):
            return None
        local = local_of(live)
        if not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        box = part_of(live, entry.name).box if is_distributed(live) else Box.whole(entry.global_shape)
        return Target(local, box, live, is_fresh=False, is_whole=box.shape == entry.global_shape)

    def _template(self, entry: LeafEntry) -> torch.Tensor | None:
        """The distributed tensor like which a fresh one has to lie."""
        live = self.live.get(entry.name)
        if live is None:
            prefix, _, rest = entry.name.rpartition("/")[0].rpartition("/")
            parameters = self._like.get(prefix, [])
            live = parameters[int(rest)] if rest.isdecimal() and int(rest) < len(parameters) else None
        is_fit = live is not None and is_distributed(live) and tuple(live.shape) == entry.global_shape
        return live if is_fit else None

    def _fresh_size(self, entry: LeafEntry) -> int:
        template = self._template(entry)
        count = math.prod(entry.global_shape) if template is None else local_of(template).numel()
        return count * dtypes.itemsize(entry.dtype)

    def _fresh(self, entry: LeafEntry, device: torch.device) -> Target:
        template, dtype = self._template(entry), dtype_from(entry.dtype)
        if template is None:
            made = torch.empty(entry.global_shape, dtype=dtype, device=device)
            return Target(made, Box.whole(entry.global_shape), made, is_fresh=True, is_whole=True)
        local = torch.empty(local_of(template).shape, dtype=dtype, device=local_of(template).device)
        box = part_of(template, entry.name).box
        return Target(local, box, like(template, local), is_fresh=True, is_whole=box.shape == entry.global_shape)


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


def give_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give an optimizer its state, all of it in the types in which it was saved."""
    optimizer.load_state_dict(state)
    _put_back(optimizer, state)


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
            item.load(state)  # which knows of optimizers around the one that steps
            if item.optimizer is not None:
                _put_back(item.optimizer, state)
    except Exception as error:  # the user's code: whatever it says is about this checkpoint and that object
        raise StateError(f"{item.name}: load_state_dict refused the checkpoint: {error}", name=item.name) from error
