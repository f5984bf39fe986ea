"""Digests of tensors that lie on a device, without waiting for it.

Owns:    a sum over the elements that says, for practical purposes, whether two tensors hold the same bits.
Not:     tensors on the host, whose bytes are hashed (fingerprint).
Holds:   everything is queued on the device's current stream, behind what made the tensors and before what changes them.
         Sums wrap, so their order does not matter: the same bits have the same sum on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from stepwell.training.state.strides import as_words

_CHUNK: Final = 1 << 22
"""Elements at a time: three times their number of 8-byte words is what it needs beside them."""
_SMALL_CHUNK: Final = 1 << 18
"""Where there is no memory for more."""
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, 0x2545F4914F6CDD1D, -0x3B314601E57A13AD
"""Odd numbers with irregular bits: an element's place, and two rounds of mixing."""


def sums(tensors: Sequence[torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """Indices of tensors, and their sums in one tensor on their device. No wait. Raises torch.OutOfMemoryError."""
    try:
        return list(_batches(tensors, _CHUNK))
    except torch.OutOfMemoryError:
        return list(_batches(tensors, _SMALL_CHUNK))


def _batches(tensors: Sequence[torch.Tensor], chunk: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Small tensors of one size go together: there are thousands of them, and each call takes as long as for many."""
    alike: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype, tensor.numel()), []).append(index)
    for (_, _, count), found in alike.items():
        at_once = max(1, chunk // max(1, count))
        for start in range(0, len(found), at_once):
            batch = found[start : start + at_once]
            yield batch, _sum_rows([_flat(tensors[index]) for index in batch], chunk)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in a row, as whole numbers."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    words = as_words(plain)
    if words.is_complex():
        words = torch.view_as_real(words).view(torch.int64)
    return words.reshape(-1)


def _sum_rows(rows: list[torch.Tensor], chunk: int) -> torch.Tensor:
    count, device = rows[0].numel(), rows[0].device
    total = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for start in range(0, count, chunk):
        places = torch.arange(start, min(count, start + chunk), device=device).mul_(_STEP)
        parts = [row[start : start + chunk] for row in rows]
        words = (parts[0][None] if len(parts) == 1 else torch.stack(parts)).to(torch.int64)
        mixed = words.add(places).mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 29).mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum(1)
    return total
