"""The tripwire: did a leaf change while it was being copied?

Owns:    version and address of every leaf that is copied late, the fingerprints of frozen leaves, and the content
         hashes of `verify_snapshots=True`.
Holds:   compared before the optimizer may step. It is a tripwire, not a proof: a change that bumps no version
         (`.data`, numpy, some fused kernels) is seen only by the hashes; `docs/guarantees.md` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stepwell.format.checksum import block_digest

_SAMPLES = 64


@dataclass(frozen=True)
class Watched:
    """A leaf as it was at the trigger."""

    name: str
    live: Callable[[], torch.Tensor | None]
    facts: tuple[int, int]


def facts(tensor: torch.Tensor) -> tuple[int, int]:
    """Version and address of a tensor: what an ordinary change does not leave alone."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:
        return -1, tensor.data_ptr()  # an inference tensor has no version: the address is all there is


class Guard:
    """Watches the leaves of one snapshot."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []

    def watch(self, name: str, live: Callable[[], torch.Tensor | None]) -> None:
        """Remember a leaf as it is now."""
        tensor = live()
        if tensor is not None:
            self._watched.append(Watched(name, live, facts(tensor)))

    def changed(self) -> str | None:
        """Name of the first leaf that is not what it was, or None."""
        for watched in self._watched:
            tensor = watched.live()
            if tensor is None or facts(tensor) != watched.facts:
                return watched.name
        return None


def content_digest(tensor: torch.Tensor) -> str:
    """Hash of a leaf's bytes. Waits for the device."""
    host = tensor.detach().contiguous().cpu().reshape(-1)
    if not host.numel():
        return ""
    return block_digest(host.view(torch.uint8).numpy().data)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements spread over a leaf, as bytes: an update of the whole tensor changes them."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step][: _SAMPLES + 1].clone().view(torch.uint8)


class Fingerprints:
    """Samples of frozen leaves: a change that bumps no version still shows in almost every case."""

    def __init__(self) -> None:
        self._known: dict[str, torch.Tensor] = {}

    def take(self, leaves: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Samples of the leaves now, on their devices (no wait)."""
        return {name: sample(tensor) for name, tensor in leaves}

    def settle(self, samples: dict[str, torch.Tensor]) -> list[str]:
        """Compare with what was seen before; remember what is new. Returns the leaves that changed. Waits."""
        changed = []
        for name, found in samples.items():
            host = found.cpu()
            if name in self._known and not torch.equal(self._known[name], host):
                changed.append(name)
            self._known[name] = host
        return changed
