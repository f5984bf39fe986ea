"""The simplest checkpoints of many ranks that can work: `torch.save` on every rank, at a barrier, the newest by a file.

Not stepwell, and never part of it. It has the shape of `stepwell.Checkpointer` as far as the trainer uses that, so that
launcher, ledger, digests and kills can be proved without stepwell, and it can be told to forget things, so that the
tests show that they would notice (`forget`: generators, buffers, optimizer, position).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist


class Checkpointer:
    """Saves at the end of every `every`-th step; 0: never, and nothing is restored."""

    def __init__(self, where: str, loader: Any, every: int, forget: set[str], tracked: dict[str, Any]) -> None:
        self._where, self._loader, self._every, self._forget, self._tracked = where, loader, every, forget, tracked
        self._epoch = self._batches = self._step = self._saved = 0
        self._generators: dict[str, Any] | None = None
        self.data = self

    def restore(self) -> None:
        newest = Path(f"{self._where}/newest")
        if not self._every or not newest.exists():
            return
        state = torch.load(f"{self._where}/{newest.read_text()}.{dist.get_rank()}", weights_only=False)
        kept = {name: value.detach().clone() for name, value in self._tracked["model"].named_buffers()}
        for name, item in self._tracked.items():
            if name not in self._forget:
                item.load_state_dict(state[name])
        if "buffers" in self._forget:
            for name, value in self._tracked["model"].named_buffers():
                value.copy_(kept[name])
        self._epoch, self._batches = state["position"]
        self._step = self._saved = state["step"]
        if "position" in self._forget:
            self._batches += 1
        if "generators" not in self._forget:
            self._generators = state["generators"]

    def status(self) -> Any:
        return SimpleNamespace(step=self._step, lineage=0)

    def epochs(self, count: int) -> Iterator[int]:
        while self._epoch < count:
            yield self._epoch
            self._epoch, self._batches = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        self._loader.sampler.set_epoch(self._epoch)
        batches = list(self._loader.batch_sampler)
        while True:
            self._end_iteration()
            if self._batches == len(batches):
                return
            if self._generators is not None:
                set_generators(self._generators)
                self._generators = None
            batch = self._loader.collate_fn([self._loader.dataset[index] for index in batches[self._batches]])
            self._batches += 1
            yield batch

    def _end_iteration(self) -> None:
        """The trigger sits where it sits in stepwell: everything of the iteration is over."""
        self._step = self._tracked["refuses"].step
        if not self._every or self._step % self._every or self._step == self._saved:
            return
        self._saved = self._step
        state = {name: item.state_dict() for name, item in self._tracked.items()}
        state |= {"position": (self._epoch, self._batches), "step": self._step, "generators": get_generators()}
        os.makedirs(self._where, exist_ok=True)
        torch.save(state, f"{self._where}/{self._step}.{dist.get_rank()}")
        dist.barrier()
        if dist.get_rank() == 0:
            temporary = Path(f"{self._where}/newest.new")
            temporary.write_text(str(self._step))
            temporary.rename(f"{self._where}/newest")


def get_generators() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}


def set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
