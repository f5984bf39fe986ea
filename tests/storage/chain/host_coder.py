"""Stands for `codecs.device` where there is neither a GPU nor Triton: the host's own coder behind the same calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs.assignment import CodedPart, as_bytes
from stepwell.storage.codecs.coding_groups import AGAIN, FRESH, group_nbytes
from stepwell.storage.codecs.parts import Memory, make_symbols
from stepwell.storage.codecs.precoded import _kinds
from stepwell.storage.codecs.signature import part_digest, signature
from stepwell.storage.codecs.sparse import thin
from stepwell.storage.codecs.tables import stored_bits
from stepwell.training.snapshot import coded


class HostCoder:
    def __init__(self, part: CodedPart, device: torch.device) -> None:
        self.part, self.image, self.memory = part, ChainImage([part]), Memory()
        self.bits = stored_bits(part.spec)
        self.packed_nbytes = group_nbytes(part.slots, self.bits)
        self.bases = self.sparse = self.dense = 0
        """Bases, and records as marks and values, and packed: later ones may have few symbols that are not zero."""
        self.is_pending = False
        self.may_finish = threading.Event()
        self.may_finish.set()

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        self.image.fill([[value.numpy().reshape(-1) for value in values]])
        self.memory = Memory()
        self.bases += 1

    def encode(self, tensors: Sequence[torch.Tensor], *, reuse: bool = True) -> None:
        values = [tensor.detach().numpy().reshape(-1) for tensor in tensors]
        self.coded = make_symbols(self.part, values, self.image.arrays[0], self.memory, reuse=reuse)
        self.is_pending = True

    def guard(self) -> None:
        raise AssertionError("there is no stream to hold")

    def finish(self, room: torch.Tensor) -> Given:
        self.may_finish.wait()
        self.is_pending = False
        lines, position, out = iter(self.coded.packed), 0, room.numpy()
        out[:] = 0xEE  # of what is not used
        for kind, slots in zip(_kinds(self.coded.heads), self.part.groups(), strict=True):
            nbytes = group_nbytes(slots, self.bits)
            if kind in (FRESH, AGAIN):
                out[position : position + nbytes] = next(lines)
            position += nbytes
        packed = np.concatenate([np.empty(0, np.uint8), *self.coded.packed])
        if (sparse := thin(packed)) is not None:
            end = sparse.marks.size + sparse.values.size
            out[: sparse.marks.size], out[sparse.marks.size : end], out[end:] = sparse.marks, sparse.values, 0xEE
            self.coded = replace(self.coded, packed=[], sparse=sparse)
            self.sparse += 1
        else:
            self.dense += 1
        array = self.image.arrays[0]
        return Given(self.coded, part_digest(array.nbytes, signature(as_bytes(array))), 1.0, 100.0)


def use_host_coder(monkeypatch: pytest.MonkeyPatch) -> list[HostCoder]:
    """From here on parameters on the CPU are taken for such on a device. Returns the coders that are made."""
    made: list[HostCoder] = []

    def make(part: CodedPart, device: torch.device) -> HostCoder:
        made.append(HostCoder(part, device))
        return made[-1]

    monkeypatch.setattr(coded, "can_code", lambda device: True)
    monkeypatch.setattr(coded, "make_coder", make)
    return made


def readers_state(coder: HostCoder) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in coder.image.leaves().items()}
