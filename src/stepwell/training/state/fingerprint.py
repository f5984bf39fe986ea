"""Whether the state changed between two moments outside of a step, as far as can be seen without reading it.

Owns:    versions and places of all tensors, plain values, and the generators' states, at one moment.
Holds:   what an object makes anew each time it is asked (a copy, a view of a NumPy array) is known by its bytes: there,
         version and place say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from stepwell.storage.format.checksum import block_digest
from stepwell.training.state import rng
from stepwell.training.state.flatten import Flat


def facts(tensor: torch.Tensor) -> tuple[int, int]:
    """Version and address of a tensor: what an ordinary change does not leave alone."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:
        return -1, tensor.data_ptr()  # an inference tensor has no version: the address is all there is


def content_digest(tensor: torch.Tensor) -> str:
    """Hash of a leaf's bytes. Waits for the device."""
    host = tensor.detach().contiguous().cpu().reshape(-1)
    if not host.numel():
        return block_digest(b"")
    return block_digest(host.view(torch.uint8).numpy().data)


def _users(tensor: torch.Tensor) -> int:
    """How many tensors, the user's and ours, have this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


_USERS_OF_NEW: Final = _users(torch.empty(1))


@dataclass(frozen=True)
class Fingerprint:
    """The state at one moment. Costs a microsecond a leaf, and a hash of what is made anew."""

    tree: Any
    tensors: list[tuple[str, tuple[int, int] | str]]
    generators: str

    @staticmethod
    def of(flat: Flat) -> Fingerprint:
        """Of the tracked objects, taken apart, and the generators as they are now."""
        fixed, rest = flat.leaves[: flat.fixed_count], flat.leaves[flat.fixed_count :]
        tensors: list[tuple[str, tuple[int, int] | str]] = [(leaf.name, facts(leaf.local)) for leaf in fixed]
        for leaf in rest:
            is_new = _users(leaf.local) <= _USERS_OF_NEW  # nobody but us holds it
            tensors.append((leaf.name, content_digest(leaf.local) if is_new else facts(leaf.local)))
        return Fingerprint(flat.tree, tensors, block_digest(repr(_plain(rng.capture())).encode()))

    def changed(self, now: Fingerprint) -> list[str]:
        """Names of tracked objects that are not what they were."""
        found = {name for name in now.tree if now.tree[name] != self.tree.get(name)}
        before = dict(self.tensors)
        found |= {name.split("/")[0] for name, seen in now.tensors if before.get(name) != seen}
        return sorted(found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
