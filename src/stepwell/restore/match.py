"""Which live tensor each leaf of a checkpoint goes into, and what does not fit.

Owns:    the comparison of a checkpoint with the live objects, and the memory of leaves that have no place there yet.
Holds:   nothing is changed, and no byte is read; every mismatch is listed by name; what lies in memory otherwise than
         it was saved is filled where it is if a user's object holds it, and made anew if only an optimizer does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from stepwell.errors import DamagedError
from stepwell.restore.whole import Whole
from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import LeafEntry
from stepwell.training.state.flatten import dtype_from, dtype_name, flatten, leaf_name, unflatten
from stepwell.training.state.shards import is_distributed, like, local_of, part_of
from stepwell.training.state.strides import dense_strides, row_major, shares_elements, stretch
from stepwell.training.state.tracked import Tracked

_DEVICE_GRAIN: Final = 512
"""torch hands out device memory in multiples of this,"""
_POOLED_BYTES: Final = 1 << 20
"""and up to this size from pools of their own."""
_OF_SCHEDULES: Final = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_lr", "base_momentum", "max_momentum", "swa_lr", "param_names", "name")
)
"""What schedules and users add to a group."""
_NO_TENSOR: Final = torch.empty(0)
_Key = tuple[torch.device, int, torch.Size]
"""Where a tensor lies, and its shape."""


def leaf_names(tree: Any) -> list[str]:
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
            names = leaf_names(value) if isinstance(value, dict) and "$tensor" in value else []
            found[str(key)] = names[0] if names else None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DamagedError(f"the saved state of a module is no state dict: {error}") from error
    return found


def _misfit(optimizer: torch.optim.Optimizer, tree: Any) -> str | None:
    """Why an optimizer cannot take a saved state, as far as its groups show: it is of another kind, or has others."""
    try:
        saved = unflatten(tree, lambda leaf: _NO_TENSOR)["param_groups"]
        counts = [len(group["params"]) for group in saved]
        keys = {key for group in saved for key in group}
    except (TypeError, LookupError, AttributeError):
        return None  # an optimizer with a form of its own: it says itself what does not fit
    live = [len(group["params"]) for group in optimizer.param_groups]
    if counts != live:
        return f"{_groups(counts)} in the checkpoint, {_groups(live)} live"
    here = {key for group in optimizer.param_groups for key in group}
    missing, unknown = here - keys - _OF_SCHEDULES, keys - here - _OF_SCHEDULES
    if missing and unknown:  # one of them alone is another version of torch
        return (
            f"saved by another kind of optimizer: the checkpoint has {', '.join(sorted(unknown))}, and lacks "
            f"{', '.join(sorted(missing))} of {type(optimizer).__qualname__}"
        )
    return None


def _groups(counts: Sequence[int]) -> str:
    return f"{len(counts)} parameter group{'s' * (len(counts) != 1)} of {', '.join(map(str, counts))} parameters"


@dataclass(frozen=True)
class Target:
    """Where a leaf goes: memory for the box of it that belongs here, and what the object is given in the end."""

    tensor: torch.Tensor
    box: Box
    given: torch.Tensor
    is_fresh: bool
    is_whole: bool


class Fit:
    """Compares a checkpoint with the live objects and finds the live tensor for each leaf.

    chosen:  those of all that are tracked which are restored
    """

    def __init__(
        self, whole: Whole, chosen: Sequence[Tracked], only: set[str] | None, tracked: Sequence[Tracked]
    ) -> None:
        self.problems: list[str] = whole.bound_to_ranks()
        self.live: dict[str, torch.Tensor] = {}
        self.skipped: set[str] = set()
        self.refused: set[str] = set()
        """Objects that could not take their state, and keep the one they have."""
        self._parameters: dict[str, list[torch.Tensor]] = {}
        self._remade: set[str] = set()
        self._saved: dict[_Key, LeafEntry] = {}
        saved, tree = whole.leaves, whole.record.tree
        names = {item.name for item in chosen}
        for name in sorted((only or set()) - names):
            self.problems.append(f"{name}: asked for with only=, but not tracked")
        if only is None:
            for name in sorted(set(tree) - names - {"stepwell"}):
                self.problems.append(f"{name}: in the checkpoint, but not tracked")
        for item in tracked:
            if item.module is not None and item.name in tree:
                self._module(item, saved, tree[item.name], is_chosen=item.name in names)
        for item in chosen:
            if item.name not in tree:
                self.problems.append(f"{item.name}: tracked, but not in the checkpoint")
            elif item.zero is not None and item.zero.world_size != len(whole.parts):
                self.problems.append(
                    f"{item.name}: ZeRO's state was saved by {len(whole.parts)} ranks, these are {item.zero.world_size}"
                )
            elif item.optimizer is not None:
                self._optimizer(item, item.optimizer, tree[item.name])

    def _optimizer(self, item: Tracked, optimizer: torch.optim.Optimizer, tree: Any) -> None:
        """State that exists already is filled in place; what is created at the first step comes fresh."""
        if problem := _misfit(optimizer, tree):
            self.problems.append(f"{item.name}: {problem}")
            self.refused.add(item.name)
            return
        leaves = flatten({item.name: item.state()}).leaves
        self.live.update({leaf.name: leaf.local if leaf.origin is None else leaf.origin for leaf in leaves})
        self._remade.update(leaf.name for leaf in leaves)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters[leaf_name((item.name, "state"))] = parameters

    def _module(self, item: Tracked, saved: dict[str, LeafEntry], tree: Any, *, is_chosen: bool) -> None:
        """Compare key by key: what is tied in one place and not in the other still fits."""
        stored = _keys(tree)
        live = {key: value for key, value in item.state().items() if isinstance(value, torch.Tensor)}
        label = f"{item.name}/{{}}".format
        problems = [f"{label(key)}: missing in the checkpoint" for key in live if key not in stored]
        for key, name in stored.items():
            if name is None:
                continue
            tensor, entry = live.get(key), saved.get(name)
            if tensor is None:
                problems.append(f"{label(key)}: unexpected, the live module has no such tensor")
            elif entry is None or is_lazy(tensor):  # a lazy one takes its shape from what it is given
                continue
            elif tensor.is_meta:
                problems.append(f"{label(key)}: the live tensor is on the meta device; call to_empty(device=...) first")
                self.skipped.add(label(key))
            elif tuple(tensor.shape) != entry.global_shape:
                found = f"{entry.global_shape} in the checkpoint, {tuple(tensor.shape)} live"
                problems.append(f"{label(key)}: shape {found}")
                self.skipped.add(label(key))
            elif tensor.dtype != dtype_from(entry.dtype):
                problems.append(f"{label(key)}: {entry.dtype} in the checkpoint, {dtype_name(tensor.dtype)} live")
            else:
                self._saved[_key(tensor)] = entry
                if is_chosen:
                    self.live.setdefault(name, tensor.detach())
        self.problems += problems if is_chosen else []

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
        if shares_elements(local) or local.is_conj() or local.is_neg():
            return None
        if entry.name in self._remade and local.stride() != self._strides(entry, tuple(local.shape)):
            return None
        box = part_of(live, entry.name).box if is_distributed(live) else Box.whole(entry.global_shape)
        return Target(local, box, live, is_fresh=False, is_whole=box.shape == entry.global_shape)

    def _parameter(self, entry: LeafEntry) -> torch.Tensor | None:
        """The parameter of which a leaf is an optimizer's state, if it is of the same shape."""
        prefix, _, number = entry.name.rpartition("/")[0].rpartition("/")
        parameters = self._parameters.get(prefix, [])
        found = parameters[int(number)] if number.isdecimal() and int(number) < len(parameters) else None
        is_fit = found is not None and not is_lazy(found) and tuple(found.shape) == entry.global_shape
        return found if is_fit else None

    def _template(self, entry: LeafEntry) -> torch.Tensor | None:
        """The distributed tensor like which a fresh one has to lie."""
        live = self.live.get(entry.name)
        if live is None:
            live = self._parameter(entry)
        is_fit = live is not None and is_distributed(live) and tuple(live.shape) == entry.global_shape
        return live if is_fit else None

    def _strides(self, entry: LeafEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How the part of a leaf that belongs here is to lie in memory, where nobody but us holds it.

        As it was saved. But what lay as its parameter did lies as that does now: fused kernels take both in the order
        of memory, and the script may have changed that of the parameter.
        """
        parameter = self._parameter(entry)
        if parameter is not None and local_of(parameter).shape == shape:
            saved = self._saved.get(_key(parameter))
            if entry.strides == (None if saved is None else saved.strides):
                return dense_strides(local_of(parameter))
        return row_major(shape) if entry.strides is None else stretch(entry.strides, entry.global_shape, shape)

    def _fresh_size(self, entry: LeafEntry) -> int:
        template = self._template(entry)
        count = math.prod(entry.global_shape) if template is None else local_of(template).numel()
        return count * dtypes.itemsize(entry.dtype)

    def _fresh(self, entry: LeafEntry, device: torch.device) -> Target:
        template, box = self._template(entry), Box.whole(entry.global_shape)
        if template is not None:
            device, box = local_of(template).device, part_of(template, entry.name).box
        shape = box.shape if template is None else tuple(local_of(template).shape)
        made = torch.empty_strided(shape, self._strides(entry, shape), dtype=dtype_from(entry.dtype), device=device)
        given = made if template is None else like(template, made)
        return Target(made, box, given, is_fresh=True, is_whole=box.shape == entry.global_shape)


def _key(tensor: torch.Tensor) -> _Key:
    local = local_of(tensor)
    return local.device, local.data_ptr(), tensor.shape


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
