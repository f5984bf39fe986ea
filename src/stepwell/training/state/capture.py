"""The state of the tracked objects, taken apart again and again: what did not change is not looked at twice.

Owns:    which objects can be remembered (plain modules and optimizers), and the test that a memory still holds.
Holds:   the answer is the one of `flatten`: a module or optimizer whose tensors, names or places changed, or that
         answers for its state itself, is asked anew. The test costs a fraction of a microsecond a leaf.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stepwell.training.state.flatten import Collector, Flat, Leaf
from stepwell.training.state.roles import Owners, Role, assign_roles
from stepwell.training.state.shards import is_distributed, only_shards
from stepwell.training.state.tracked import Tracked

_PLAIN = (torch.Tensor, int, float, bool, str, type(None))
"""Values in an optimizer's state of which the same object is the same value, or the same tensor."""


class Capture:
    """Takes the state of one run apart. Constructing only assigns."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._tracked = tracked
        self._memory: _Memory | None = None

    def flatten(self, own: dict[str, Any] | None = None) -> Flat:
        """The state now, with the run's `own` part. Raises StateError."""
        if self._memory is None or not self._memory.is_true():
            self._memory = _Memory(self._tracked)
            if not self._memory.is_live:
                self._memory = _Memory([])
        memory = self._memory
        collector = memory.collector.fork()
        trees = {}
        for item in self._tracked:
            if item.name not in memory.trees:
                trees[item.name] = collector.encode(item.state(), (item.name,))
            elif item.optimizer is not None:
                groups = collector.encode(item.state()["param_groups"], (item.name, "param_groups"))
                trees[item.name] = {"state": memory.trees[item.name], "param_groups": groups}
            else:
                trees[item.name] = memory.trees[item.name]
        if own is not None:
            trees["stepwell"] = collector.encode(own, ("stepwell",))
        if len(memory.trees) < sum(item.module is not None or item.optimizer is not None for item in self._tracked):
            return Flat(trees, collector.leaves, texts=memory.texts)
        return Flat(trees, collector.leaves, memory, len(memory.collector.leaves), texts=memory.texts)

    def find_roles(self, leaves: Sequence[Leaf]) -> list[Role]:
        """Of each leaf whether anybody changes it, and when, as far as one can see."""
        return assign_roles(leaves, Owners(self._tracked), ())


class _Memory:
    """Trees and leaves of the objects that can be remembered, and what they looked like."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self.collector = Collector()
        self.trees: dict[str, Any] = {}
        self._texts: dict[int, str] | None = None
        self._modules = [item.module for item in tracked if item.module is not None and _is_plain_module(item.module)]
        self._optimizers = [
            item.optimizer for item in tracked if item.optimizer is not None and _is_plain_optimizer(item.optimizer)
        ]
        for item in tracked:
            if item.module in self._modules and item.module is not None:
                self.trees[item.name] = self.collector.encode(item.module.state_dict(), (item.name,))
            elif item.optimizer in self._optimizers and item.optimizer is not None:
                state = item.optimizer.state_dict()["state"]
                self.trees[item.name] = self.collector.encode(state, (item.name, "state"))
        self._parts = [part for module in self._modules for part in module.modules()]
        self._objects = self._see()[1]  # held: an object that is gone could give its identity to another one
        self._ids = list(map(id, self._objects))
        self._names = self._see()[0]
        tensors = list({id(value): value for value in self._objects if isinstance(value, torch.Tensor)}.values())
        self._plain = [tensor for tensor in tensors if not is_distributed(tensor)]
        self._distributed: list[Any] = [tensor for tensor in tensors if is_distributed(tensor)]
        self._places = self._place()

    def texts(self) -> dict[int, str]:
        """JSON of the trees, by their identity. Made at the first save."""
        if self._texts is None:
            dumped = {id(tree): json.dumps(tree, separators=(",", ":")) for tree in self.trees.values()}
            self._texts = dumped
        return self._texts

    @property
    def is_live(self) -> bool:
        """Whether all leaves are live tensors. A rare kind (conjugate views) is stored as a copy made at once."""
        places = set(self._places[0])
        return all(leaf.tensor.data_ptr() in places for leaf in self.collector.leaves if leaf.tensor.numel())

    def is_true(self) -> bool:
        """Whether everything is still the same object, under the same name, in the same place."""
        names, objects = self._see()
        return list(map(id, objects)) == self._ids and names == self._names and self._place() == self._places

    def _place(self) -> tuple[list[Any], ...]:
        """Where and how each tensor lies: `.data = ...` changes that and leaves the object alone."""
        tensors: list[torch.Tensor] = self._plain + [tensor._local_tensor for tensor in self._distributed]
        return (
            [tensor.data_ptr() for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [None if tensor.is_contiguous() else tensor.stride() for tensor in tensors],
            [tensor.requires_grad for tensor in self._plain],
            [tensor.requires_grad for tensor in self._distributed],
            [tensor._spec for tensor in self._distributed],
        )

    def _see(self) -> tuple[list[Any], list[Any]]:
        """Names (and how many of them), and the objects behind them."""
        own, children = self._own_tensors(), [part._modules for part in self._parts]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        names: list[Any] = [name for mapping in (*own, *children, *states) for name in mapping]
        names += map(len, (*own, *children, *states, *groups))
        hooks = [hooks for part in self._parts for hooks in (part._state_dict_hooks, part._state_dict_pre_hooks)]
        names += [number for mapping in hooks for number in mapping]
        names += ["state_dict" in vars(part) for part in self._parts]
        objects = [value for mapping in (*own, *children, *states) for value in mapping.values()]
        objects += [parameter for parameters in groups for parameter in parameters]
        objects += [parameter for optimizer in self._optimizers for parameter in optimizer.state]
        return names, objects

    def _own_tensors(self) -> list[dict[str, torch.Tensor | None]]:
        """Of each part its parameters, and its buffers that are saved."""
        found: list[dict[str, torch.Tensor | None]] = []
        for part in self._parts:
            hidden = part._non_persistent_buffers_set
            buffers = part._buffers
            found.append(part._parameters)  # type: ignore[arg-type]
            found.append({name: buffers[name] for name in buffers if name not in hidden} if hidden else buffers)
        return found


def _is_plain_module(module: nn.Module) -> bool:
    """Whether its state is what its parameters and buffers are, and nothing of its own making."""
    return all(
        _is_inherited(part, nn.Module, ("state_dict", "_save_to_state_dict", "get_extra_state"))
        and not part._state_dict_hooks
        and all(map(only_shards, part._state_dict_pre_hooks.values()))
        for part in module.modules()
    )


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    return (
        _is_inherited(optimizer, torch.optim.Optimizer, ("state_dict",))
        and not any(hooks)
        and all(
            isinstance(state, dict) and all(isinstance(value, _PLAIN) for value in state.values())
            for state in optimizer.state.values()
        )
    )


def _is_inherited(thing: object, base: type, names: Iterable[str]) -> bool:
    return all(getattr(type(thing), name, None) is getattr(base, name) and name not in vars(thing) for name in names)


def leaves_after(flat: Flat) -> list[Leaf]:
    """The leaves that may be others each time."""
    return flat.leaves[flat.fixed_count :]
