"""The tripwire: did a leaf change while it was being copied?

Owns:    version and address of every leaf that is copied late, the fingerprints of frozen leaves, and the content
         hashes of `verify_snapshots=True`.
Holds:   compared before the optimizer may step. It is a tripwire, not a proof: a change that bumps no version
         (`.data`, numpy, some fused kernels) is seen only by the hashes; `docs/guarantees.md` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from stepwell.storage.format.checksum import block_digest
from stepwell.training.state.fingerprint import facts
from stepwell.training.state.flatten import Copy, Flat

_SAMPLES = 64
Live = Callable[[], "torch.Tensor | None"]
"""The way to a leaf's live tensor, which may have been replaced by another one meanwhile."""


class Guard:
    """Watches leaves from its making on. Costs a fraction of a microsecond a leaf."""

    def __init__(self, names: Sequence[str] = (), live: Sequence[Live] = ()) -> None:
        self._names, self._live = names, live
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int] | None]:
        tensors = [live() for live in self._live]
        try:
            versions = [tensor._version for tensor in tensors]  # type: ignore[union-attr]
            return list(zip(versions, [tensor.data_ptr() for tensor in tensors], strict=True))  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):  # one is gone, or has no version
            return [None if tensor is None else facts(tensor) for tensor in tensors]

    def changed(self) -> str | None:
        """Name of the first leaf that is not what it was, or None."""
        return next(iter(self.all_changed()), None)

    def all_changed(self) -> list[str]:
        """Names of all leaves that are not what they were."""
        now = self._look()
        if now == self._seen:
            return []
        return [name for name, was, found in zip(self._names, self._seen, now, strict=True) if was != found]


class Samples:
    """A few elements spread over each of some leaves: an update of a whole tensor changes them."""

    def __init__(self, leaves: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[torch.Tensor]]] = {}
        for name, tensor in leaves:
            names, views = self._groups.setdefault((tensor.device, tensor.dtype), ([], []))
            names.append(name)
            views.append(_sample(tensor))

    def take(self) -> list[tuple[list[str], list[int], torch.Tensor]]:
        """The samples as they are now, one tensor per device and type: no wait, and one operation for all leaves."""
        return [
            (names, [view.numel() for view in views], torch.cat(views).view(torch.uint8))
            for names, views in self._groups.values()
        ]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    plain, count = tensor.detach() if tensor.requires_grad else tensor, tensor.numel()
    step = max(1, count // _SAMPLES)
    if plain.is_contiguous():  # one call for three: there are thousands of leaves
        return plain.as_strided((min(_SAMPLES + 1, -(-count // step)),), (step,))
    return plain.reshape(-1)[::step][: _SAMPLES + 1]


Taken = dict[str, list[tuple[list[str], list[int], torch.Tensor]]]


class Copies:
    """Samples of tensors of which other ranks have copies: all of them have the same, or they are no copies."""

    def __init__(self) -> None:
        self._fixed: list[Copy] = []
        self._samples: dict[str, Samples] = {}

    def take(self, flat: Flat) -> list[Taken]:
        """The samples as they are now, by the ranks that hold them. No wait."""
        if self._fixed is not flat.fixed_copies:
            self._fixed, self._samples = flat.fixed_copies, _grouped(flat.fixed_copies)
        both = (self._samples, _grouped(flat.copies))
        return [{ranks: samples.take() for ranks, samples in groups.items()} for groups in both]


def _grouped(copies: Sequence[Copy]) -> dict[str, Samples]:
    groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for ranks, name, tensor in sorted(copies, key=lambda item: item[:2]):
        groups.setdefault(ranks, []).append((name, tensor))
    return {ranks: Samples(leaves) for ranks, leaves in groups.items()}


def digests(taken: Sequence[Taken]) -> dict[str, str]:
    """One for each set of ranks, whatever order its tensors have here. Waits for the device."""
    found: dict[str, dict[str, bytes]] = {}
    for groups in taken:
        for ranks, samples in groups.items():
            for names, counts, values in samples:
                pieces = _cut(bytes(values.cpu().numpy()), counts)
                found.setdefault(ranks, {}).update(zip(names, pieces, strict=True))
    return {ranks: block_digest(b"".join(pieces[name] for name in sorted(pieces))) for ranks, pieces in found.items()}


def _cut(data: bytes, counts: Sequence[int]) -> Iterator[bytes]:
    """The samples of each leaf, of so many elements."""
    width, start = len(data) // max(1, sum(counts)), 0
    for count in counts:
        yield data[start : start + count * width]
        start += count * width


class Fingerprints:
    """Samples of frozen leaves: a change that bumps no version still shows in almost every case."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def settle(self, samples: Sequence[tuple[list[str], list[int], torch.Tensor]]) -> list[str]:
        """Compare with what was seen before; remember what is new. Returns the leaves that changed. Waits."""
        changed = []
        for names, counts, found in samples:
            for name, piece in zip(names, _cut(bytes(found.cpu().numpy()), counts), strict=True):
                if self._known.setdefault(name, piece) != piece:
                    changed.append(name)
                    self._known[name] = piece
        return changed
