"""Tensors of which this process holds a part: what that part is.

Owns:    the knowledge of torch's DTensor, and of the wrappers that many ranks put around a module.
Holds:   torch.distributed is never imported here: who has such a tensor has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from stepwell.errors import StateError
from stepwell.storage.format.box import Box
from stepwell.storage.format.checksum import block_digest

_SHARDING_HOOK: Final = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"


class ShardPart(NamedTuple):
    """The local tensor, and which box it is of a whole tensor of `shape`."""

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box


def is_distributed(value: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """What lies in this process's memory of it."""
    local: torch.Tensor = value._local_tensor if is_distributed(value) else value  # type: ignore[attr-defined]
    return local


def only_shards(hook: Any) -> bool:
    """Whether a hook before `state_dict` is the one of FSDP2: it puts the shards in the place of whole parameters.

    Whole parameters are other objects, so who looks at the objects sees whether that is needed.
    """
    return (
        getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")
        and getattr(hook, "__qualname__", "") == _SHARDING_HOOK
    )


def part_of(value: Any, label: str) -> ShardPart:
    """Which part of a DTensor is here. Raises StateError for one that is no part of anything, with `label` in it."""
    if any(placement.is_partial() for placement in value.placements):
        raise StateError(
            f"{label}: a DTensor with a partial placement is a sum that is not computed yet; redistribute it first",
            path=label,
            found=str(value.placements),
        )
    shape, local = tuple(value.shape), value._local_tensor
    if not local.numel():
        return ShardPart(local, shape, Box((0,) * len(shape), (0,) * len(shape)))
    (chunk,) = value.__create_chunk_list__()
    return ShardPart(local, shape, Box(tuple(chunk.offsets), tuple(chunk.sizes)))


_mesh_digests: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def mesh_of(value: Any) -> str:
    """The ranks a DTensor lies on, as a digest."""
    mesh = value.device_mesh
    if mesh not in _mesh_digests:  # thousands of leaves lie on a few meshes of thousands of ranks
        _mesh_digests[mesh] = block_digest(str(mesh.mesh.tolist()).encode())
    return _mesh_digests[mesh]


def is_only_here(value: Any, ranks: int) -> bool:
    """Whether no other of so many ranks can hold the same part of a DTensor: all of them are on its mesh, and each
    place there has another part. Of an empty part there may be several.
    """
    return value.device_mesh.size() == ranks and all(placement.is_shard() for placement in value.placements)


def like(value: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor that lies as `value` does, with this local part."""
    made: torch.Tensor = type(value).from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return made


def zero_of(target: Any) -> Any:
    """The target as a ZeroRedundancyOptimizer, if it is one: its `optim` steps and keeps what is this rank's."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return target if module is not None and isinstance(target, module.ZeroRedundancyOptimizer) else None


def unwrapped(target: Any) -> Any:
    """The module behind DistributedDataParallel, whose names are those of one process."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    is_wrapper = module is not None and isinstance(target, module.DistributedDataParallel)
    return target.module if is_wrapper else target
