"""Verified bytes into live torch objects.

Owns:    the order of comparing, reading and giving, and what is put right after an object took its state.
Not:     which live tensor a leaf goes into (match).
Holds:   modules and optimizers are filled in place, so there is never a second copy of the state; every mismatch is
         listed by name in one error before any byte is read; a record is not believed: what it says of the values is
         checked before any object is given its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from stepwell.errors import DamagedError, StateError, listing
from stepwell.restore import needed_records
from stepwell.restore.held_files import held
from stepwell.restore.into_tensors import Placing
from stepwell.restore.match import Fit, Target, leaf_names
from stepwell.restore.verified_read import read_record_leaves, read_some
from stepwell.restore.whole import Fetch, Part, Whole
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import Record
from stepwell.training.state import rng
from stepwell.training.state.flatten import dtype_from, leaf_name, unflatten
from stepwell.training.state.shards import is_distributed
from stepwell.training.state.strides import shares_elements, without_repeats
from stepwell.training.state.tracked import Tracked
from stepwell.types import CheckpointId


@dataclass(frozen=True)
class Loaded:
    """What came back.

    own:       the run's own state; None if only some objects were restored
    problems:  what did not fit (strict=False)
    nbytes:    how many were read
    frozen:    leaves that did not change
    """

    id: CheckpointId
    own: Any
    problems: list[str]
    nbytes: int
    frozen: set[str]


Touched = dict[int, str]
"""Live tensors, by address, into which bytes of a checkpoint went that could not be restored, with their names."""


def load(
    parts: Sequence[Part],
    tracked: Sequence[Tracked],
    *,
    mine: int | None = 0,
    only: set[str] | None,
    strict: bool,
    check: Callable[[dict[str, Any]], None] | None = None,
    touched: Touched | None = None,
) -> Loaded:
    """Fill the live objects from a checkpoint. See `Loading`."""
    return Loading(parts, tracked, mine=mine, only=only, strict=strict, check=check).run(touched)


class Loading:
    """A checkpoint that is compared with the live objects, and then fills them.

    mine:   the part whose values, and leaves of a rank's own, are restored; None: another number of ranks saved it
    check:  told the run's own state (its generators are not read yet) before anything is changed; may refuse it
    is_lazy:  see `Whole`

    Constructing compares, and changes nothing. Raises StateError (mismatch) or DamagedError.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        tracked: Sequence[Tracked],
        *,
        mine: int | None,
        only: set[str] | None,
        strict: bool,
        check: Callable[[dict[str, Any]], None] | None,
        is_lazy: bool = True,
    ) -> None:
        self.record = parts[mine or 0].record
        self._only, self._strict = only, strict
        with self._naming():
            if check is not None:
                check(_own_values(self.record))
            self.whole = Whole(parts, mine, is_lazy=is_lazy)
            self._compare(tracked)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Damage that does not say where it is lies in this record."""
        try:
            yield
        except DamagedError as error:
            if "path" in error.fields:
                raise
            path = f"{self.record.id}/{self.record.owner.stem}.json"
            raise DamagedError(f"{path}: {error}", **{**error.fields, "path": path}) from error

    def _compare(self, tracked: Sequence[Tracked]) -> None:
        record, only = self.record, self._only
        if not isinstance(record.tree, dict) or "stepwell" not in record.tree:
            raise DamagedError("the tree of values lacks the run's own state")
        chosen = [item for item in tracked if only is None or item.name in only]
        self._fit = fit = Fit(self.whole, chosen, only, tracked)
        if fit.problems and self._strict:
            raise StateError(
                f"the checkpoint of step {record.id.step} does not fit the tracked objects:\n{listing(fit.problems)}\n"
                "restore(strict=False) restores what fits and reports the rest",
                step=record.id.step,
                problems=fit.problems,
            )
        self._chosen = [item for item in chosen if item.name not in fit.refused]
        names = [item.name for item in self._chosen if item.name in record.tree]
        self._trees = {name: record.tree[name] for name in [*names, *([] if only is not None else ["stepwell"])]}
        wanted = {name for tree in self._trees.values() for name in leaf_names(tree)}
        missing = wanted - self.whole.leaves.keys()
        if missing:
            raise DamagedError(f"the record lacks leaf {min(missing)!r}")
        self._targets = fit.targets([entry for name, entry in self.whole.leaves.items() if name in wanted])

    def lacking(self) -> needed_records.Wanted:
        """What this rank needs, and no record has that was looked into. Raises DamagedError."""
        with self._naming():
            boxes = self.whole.lacking({name: target.box for name, target in self._targets.items()})
        return needed_records.ask(boxes, {name: self.whole.leaves[name].global_shape for name in boxes})

    def run(self, touched: Touched | None = None) -> Loaded:
        """Fill the live objects. Raises StateError or DamagedError.

        touched:  what earlier tries left behind; what this one fills is taken out, and if it fails added
        """
        with self._naming():
            return self._run({} if touched is None else touched)

    def _run(self, touched: Touched) -> Loaded:
        targets, fit = self._targets, self._fit
        filled = {t.tensor.data_ptr(): name for name, t in targets.items() if t.tensor.numel() and not t.is_fresh}
        nbytes = _read(self.whole, targets, is_all=self._only is None, on_open=lambda: touched.update(filled))
        state = {name: unflatten(tree, lambda leaf: targets[leaf].given) for name, tree in self._trees.items()}
        own = state.get("stepwell")
        if own is not None:
            _check_own(own, self.record)
        for item in self._chosen:
            if item.name in state:
                _give(item, state[item.name], fit, strict=self._strict)
        replaced = [item.name for item in self._chosen if item.name in state and item.module is None]
        _forget(touched, filled, replaced)
        return Loaded(self.record.id, own, fit.problems, nbytes, self.whole.frozen)


def _forget(touched: Touched, filled: Collection[int], replaced: Sequence[str]) -> None:
    """These tensors have what they should have; and objects that are no modules have taken a new state."""
    labels = tuple(f"{leaf_name((name,))}/" for name in replaced)
    for address, name in list(touched.items()):
        if address in filled or name.startswith(labels):
            del touched[address]


def _read(whole: Whole, targets: dict[str, Target], *, is_all: bool, on_open: Callable[[], None] = lambda: None) -> int:
    """Fill the targets. Returns the bytes read. `on_open`: called when all files are open, before anything changes."""
    if whole.is_single and all(target.is_whole for target in targets.values()):
        fresh = {name for name, target in targets.items() if target.is_fresh}
        wanted = None if is_all else set(targets)
        numbers = {leaf.file for leaf in whole.record.leaves if wanted is None or leaf.name in wanted}
        needed = range(len(whole.record.files)) if is_all else numbers
        with held([(whole.parts[0], needed)]) as (part,):
            on_open()
            with Placing({name: target.tensor for name, target in targets.items()}, fresh) as placing:
                return read_record_leaves(part.record, part.open_source, wanted, placing)
    reads = list(whole.plan({name: target.box for name, target in targets.items()}))
    with held([(part, {fetch.entry.file for fetch in fetches}) for part, fetches in reads]) as parts:
        on_open()
        return sum(_read_part(part, fetches, targets) for part, (_, fetches) in zip(parts, reads, strict=True))


def _read_part(part: Part, fetches: Sequence[Fetch], targets: dict[str, Target]) -> int:
    rooms, late = {}, []
    for fetch in fetches:
        target = targets[fetch.entry.name]
        place = target.tensor[_slices(fetch.target)]
        if fetch.is_whole:
            rooms[fetch.entry.name] = place
            continue
        room = torch.empty(fetch.entry.shape, dtype=place.dtype, device=place.device)
        rooms[fetch.entry.name] = room
        late.append((place, room[_slices(fetch.needed)]))
    with Placing(rooms, {name for name in rooms if targets[name].is_fresh}) as placing:
        nbytes = read_some(part.record, part.open_source, [fetch.entry for fetch in fetches], placing)
    for place, room in late:
        place.copy_(room)
    return nbytes


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


def _fill_expanded(name: str, module: torch.nn.Module, state: dict[str, Any]) -> None:
    """torch fills no tensor whose elements share memory: fill what such a tensor was expanded from, and give it itself.

    Raises StateError where the checkpoint has other values for elements that are one.
    """
    live = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for key, place in live:
        value = state.get(key)
        if not isinstance(value, torch.Tensor) or is_lazy(place) or is_distributed(place):
            continue
        if place.shape != value.shape or not shares_elements(place):
            continue
        whole = without_repeats(place.detach())
        once = value[tuple(slice(size) for size in whole.shape)]
        if not torch.equal(_image(once.expand_as(value)), _image(value)):
            raise StateError(
                f"{name}/{key}: the live tensor is expanded, one element stands for several, and in the checkpoint "
                "these differ; make it a tensor of its own with .clone()",
                name=name,
            )
        whole.copy_(once)
        state[key] = place


def _image(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, row by row: not a number equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _give(item: Tracked, state: Any, fit: Fit, *, strict: bool) -> None:
    if item.module is not None:
        _fill_expanded(item.name, item.module, state)
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
        raise StateError(
            f"{item.name}: load_state_dict refused the checkpoint: {type(error).__name__}: {error}. Other objects "
            "may have new values already: make all of them anew before training",
            name=item.name,
        ) from error
