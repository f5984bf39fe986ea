"""torch.distributed.checkpoint (DCP) reads stepwell's checkpoints, and a run goes on from a DCP checkpoint.

    dcp.load(state_dict, storage_reader=StepwellReader("runs/x"))      into a live state dict, on any number of ranks
    load_into("old/step-1000", model=model, optimizer=optimizer)       from DCP, or from a StepwellReader

Owns:    the keys: tracked name + key of the object's state dict, as DCP flattens {"model": model.state_dict(), ...}.
Not:     reading and checking (interchange, restore).
Holds:   of a tensor only the blocks in which this rank's part lies are read, each is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from stepwell import ConfigError, RestoreError, StateError
from stepwell.tools.interchange.dcp_state import (
    Behind,
    Box,
    flat_state,
    give_optimizer,
    is_run,
    open_checkpoint,
    own_errors,
    tree_of,
)

__all__ = ["StepwellReader", "load_into", "parameter_names"]


class StepwellReader(StorageReader):
    """Reads a checkpoint of a run for `dcp.load`.

    run:    the run's directory, or its address in a bucket
    step:   which checkpoint; by default the one that a restart would use
    names:  of tracked optimizers: names of their parameters, in their order (`parameter_names`), for state dicts that
            have names in the place of numbers, as those of `torch.distributed.checkpoint.state_dict`

    Where as many ranks load as saved, each gets back what was its own; otherwise all get that of rank 0.
    """

    def __init__(
        self, run: str | os.PathLike[str], step: int | None = None, *, names: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._run = os.fspath(run)
        self._step = step
        self._names = names
        self._behind: Behind | None = None

    @property
    def checkpoint_id(self) -> str:
        """The run's directory."""
        return self._run

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; `checkpoint_id`: of the run in that directory."""
        if checkpoint_id is not None:
            self._run = os.fspath(checkpoint_id)
        self._close()

    def read_metadata(self) -> Metadata:
        """Open the checkpoint. Raises RestoreError if there is none that can be read."""
        self._close()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        whole = open_checkpoint(self._run, self._step, rank, size)
        self._behind = Behind(whole, flat_state(tree_of(whole), self._names))
        flat = self._behind.flat
        found: dict[str, Any] = {key: BytesStorageMetadata() for key in flat.values}
        for key in flat.leaves:
            dtype, shape = self._behind.shape(key)
            # One chunk, whatever the ranks stored: which bytes are read for a part of it is not DCP's to plan.
            whole_chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            found[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole_chunk])
        return Metadata(found, planner_data=flat.paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to do: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank found."""
        return dataclasses.replace(plan, storage_data=str(self._opened().whole.record.id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a load of which the ranks found different checkpoints: the run went on meanwhile."""
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise RestoreError(f"ranks found different checkpoints in {self._run}: {', '.join(found)}; name a step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and values. Returns when that is done. Raises DamagedError."""
        behind = self._opened()
        try:
            tensors: list[tuple[ReadItem, torch.Tensor]] = []
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, behind.saved_value(item.storage_index.fqn))
                else:
                    tensors.append((item, planner.resolve_tensor(item).detach()))
            behind.fill([(item.storage_index.fqn, _box(item, behind), tensor) for item, tensor in tensors])
            for item, tensor in tensors:
                planner.commit_tensor(item, tensor)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a run is in this place."""
        return is_run(os.fspath(checkpoint_id))

    def _opened(self) -> Behind:
        if self._behind is None:
            raise RestoreError(f"{self._run}: call read_metadata first")
        return self._behind

    def _close(self) -> None:
        if self._behind is not None:
            self._behind.close()
            self._behind = None


def _box(item: ReadItem, behind: Behind) -> Box:
    """Which part of the tensor is asked for. DCP has one dimension for a tensor that has none."""
    _, shape = behind.shape(item.storage_index.fqn)
    return Box(tuple(item.storage_offsets), tuple(item.lengths)) if shape else Box((), ())


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of an optimizer's parameters in its order, as `get_state_dict` writes them."""
    names = {parameter: _plain_name(name) for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(parameter not in names for parameter in order)
    if unknown:
        raise ConfigError(f"{unknown} of the optimizer's parameters do not belong to this model")
    return [names[parameter] for parameter in order]


def _plain_name(name: str) -> str:
    """Without what wrappers put into it."""
    wrappers = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    parts = name.split(".")
    first = parts[1:] if parts[0] == "module" else parts  # DistributedDataParallel is the outermost
    return ".".join(part for part in first if part not in wrappers[1:])


# -- from a DCP checkpoint into live objects --------------------------------------------------------------------------


def load_into(checkpoint: str | os.PathLike[str] | StorageReader, /, *, strict: bool = True, **objects: Any) -> None:
    """Load modules, optimizers and whatever has `state_dict` from a DCP checkpoint, each under its name there.

    Collective where torch.distributed is initialized. Modules may be plain, DDP or FSDP; an optimizer's state need not
    be there yet, and may be stored by number or by name. Raises StateError, before anything is changed, if the
    checkpoint does not fit; with `strict=False` what fits is loaded. A DCP checkpoint holds pickled values: load only
    what you trust.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    entrances: list[_Entrance] = []
    error: Exception | None = None
    try:
        metadata = reader.read_metadata()
        modules = [target for target in objects.values() if isinstance(target, torch.nn.Module)]
        entrances = [_entrance(name, target, modules, metadata) for name, target in objects.items()]
    except Exception as raised:  # the other ranks wait for this one's word
        error = raised
    mine = [problem for entrance in entrances for problem in entrance.problems] if strict else []
    problems = _of_all_ranks(mine if error is None else [str(error)])
    if error is not None:
        raise error
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:12])
        more = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise StateError(f"the DCP checkpoint does not fit the objects:\n{listed}{more}", problems=problems)
    state = {key: target for entrance in entrances for key, target in entrance.wanted.items()}
    with own_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is fine
        load(state, storage_reader=reader)
    for entrance in entrances:
        entrance.give(state)


def _of_all_ranks(problems: list[str]) -> list[str]:
    """Collective: a rank that refuses alone would leave the others waiting for it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problems
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problems)
    others = [f"rank {rank}: {problem}" for rank, theirs in enumerate(found) for problem in theirs]
    return problems or others


def _entrance(name: str, target: Any, modules: Iterable[torch.nn.Module], metadata: Metadata) -> _Entrance:
    if isinstance(target, torch.nn.Module):
        return _Module(name, target, metadata)
    if isinstance(target, torch.optim.Optimizer):
        return _Optimizer(name, target, modules, metadata)
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return _Other(name, target)
    raise ConfigError(f"{name}= has no state_dict and load_state_dict", name=name)


class _Entrance:
    """One object. `wanted`: by DCP key, what is filled or replaced by a value; `problems`: what does not fit."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.problems: list[str] = []

    def give(self, state: Mapping[str, Any]) -> None:
        """Give the object what was loaded."""
        raise NotImplementedError


class _Module(_Entrance):
    """A module, under `name.` or, where a bare state dict was saved, under its own keys."""

    def __init__(self, name: str, module: torch.nn.Module, metadata: Metadata) -> None:
        super().__init__()
        self._module = module
        stored = metadata.state_dict_metadata
        live = get_model_state_dict(module)
        # By what fits better: a model may have a part that is called as it is.
        hits = {prefix: sum(prefix + key in stored for key in live) for prefix in (f"{name}.", "")}
        self._prefix = "" if hits[""] > hits[f"{name}."] else f"{name}."
        for key, value in live.items():
            found = stored.get(self._prefix + key)
            if found is None:
                self.problems.append(f"{name}.{key}: missing in the checkpoint")
            elif isinstance(found, TensorStorageMetadata) and found.size != getattr(value, "shape", None):
                shape = tuple(getattr(value, "shape", ()))
                self.problems.append(f"{name}.{key}: shape {tuple(found.size)} in the checkpoint, {shape} live")
            else:
                self.wanted[self._prefix + key] = value
        if self._prefix:
            known = {self._prefix + key for key in live}
            strange = [key for key in stored if key.startswith(self._prefix) and key not in known]
            self.problems += [f"{key}: unexpected, the live module has no such tensor" for key in strange]

    def give(self, state: Mapping[str, Any]) -> None:
        options = StateDictOptions(strict=not self.problems)
        found = {key.removeprefix(self._prefix): state[key] for key in self.wanted}
        set_model_state_dict(self._module, found, options=options)


class _Optimizer(_Entrance):
    """An optimizer, whose state is made like its parameters; it need not have stepped."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        modules: Iterable[torch.nn.Module],
        metadata: Metadata,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = [m for m in modules if {*self._parameters} <= {*m.parameters()}]
        self._names = parameter_names(owners[0], optimizer) if owners else []
        self._state: dict[int, dict[tuple[str, ...], str]] = {}
        self._options: dict[int, dict[str, str]] = {}
        for key, path in (metadata.planner_data or {}).items():
            if str(path[0]) == name and len(path) > 1:
                self._note(key, _parts(path[1:], self._names), metadata.state_dict_metadata[key])
        if not self._options:
            self.problems.append(f"{name}: no optimizer of this name in the checkpoint")

    def _note(self, key: str, parts: tuple[str, ...], stored: Any) -> None:
        kind, owner, *rest = (*parts, "", "")[: max(3, len(parts))]
        if kind == "param_groups":
            number = self._group_of(owner)
            if number is None:
                self.problems.append(f"{key}: unexpected, the live optimizer has no such group")
            elif rest != ["params"]:
                self._options.setdefault(number, {})[".".join(rest)] = key
                self.wanted[key] = None
            return
        index = self._names.index(owner) if owner in self._names else int(owner) if owner.isdecimal() else -1
        if kind != "state" or not 0 <= index < len(self._parameters):
            self.problems.append(f"{key}: unexpected, the live optimizer has no such parameter")
            return
        self._state.setdefault(index, {})[tuple(rest)] = key
        self.wanted[key] = _like(self._parameters[index], stored)

    def _group_of(self, owner: str) -> int | None:
        """By number, or by the name of a parameter in it."""
        groups = self._optimizer.param_groups
        if owner in self._names:
            parameter = self._parameters[self._names.index(owner)]
            return next(n for n, group in enumerate(groups) if any(parameter is p for p in group["params"]))
        return int(owner) if owner.isdecimal() and int(owner) < len(groups) else None

    def give(self, state: Mapping[str, Any]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        for number, options in self._options.items():
            groups[number].update({option: state[key] for option, key in options.items()})
        found: dict[int, dict[str, Any]] = {}
        for index, keys in self._state.items():
            for path, key in keys.items():
                place = found.setdefault(index, {})
                for step in path[:-1]:
                    place = place.setdefault(step, {})
                place[path[-1]] = state[key]
        give_optimizer(self._optimizer, {"state": found, "param_groups": groups})


def _parts(path: Sequence[str | int], names: Sequence[str]) -> tuple[str, ...]:
    """`state`, parameter, key; also of a state dict that was flattened, where all is one text with dots."""
    if len(path) > 1:
        return tuple(map(str, path))
    kind, _, rest = str(path[0]).partition(".")
    owner = max((name for name in names if rest.startswith(f"{name}.")), key=len, default="")
    return (kind, owner, rest[len(owner) + 1 :]) if owner else (kind, rest)


def _like(parameter: torch.Tensor, stored: Any) -> torch.Tensor | None:
    """Room for one tensor of a parameter's state: laid out as the parameter is, where it has its shape."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=stored.properties.dtype)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


class _Other(_Entrance):
    """Anything else, as DCP itself loads it."""

    def __init__(self, name: str, target: Any) -> None:
        super().__init__()
        self._name, self._target = name, target
        self.wanted = {name: target.state_dict()}

    def give(self, state: Mapping[str, Any]) -> None:
        self._target.load_state_dict(state[self._name])
