"""torch.save and safetensors: one file, the training waits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peer.rows.base import Row, Saved, fill


class TorchSave(Row):
    """Loaded with mmap, which peers.md found to be the faster way."""

    label = "torch.save"

    def path(self, step: int) -> Path:
        return self.where / f"step-{step}.pt"

    def save(self, step: int) -> Saved:
        torch.save(self.work.state(), self.path(step))
        return Saved()

    def load(self, step: int) -> None:
        fill(self.work.state(), torch.load(self.path(step), mmap=True, weights_only=True, map_location="cpu"))


class Safetensors(Row):
    """`save_file` writes CPU and CUDA tensors alike."""

    label = "safetensors save_file"

    def path(self, step: int) -> Path:
        return self.where / f"step-{step}.safetensors"

    def save(self, step: int) -> Saved:
        save_file(self.work.state(), self.path(step))
        return Saved()

    def load(self, step: int) -> None:
        fill(self.work.state(), load_file(self.path(step), device=str(self.work.device)))
