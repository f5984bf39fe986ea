"""The training run of the ledger: notes in every step, from the tensors it trains on, which samples they are.

A line of the ledger: the step, its micro-batches as (epoch, samples, digest of the bytes). The first line of each start
says from which step it resumed. A single write to a file opened for appending: a kill leaves whole lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch

COUNT, SIZE, EPOCHS = 48, 4, 3


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample carries its index, and draws from all three generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
        return torch.tensor([float(index), *draws])


def collated(items: list[torch.Tensor]) -> torch.Tensor:
    """Draws once more for the batch, as mixup does."""
    return torch.cat([torch.stack(items), torch.rand(len(items), 1)], dim=1)


def make_loader() -> Any:
    """The loader the environment asks for: a plain one, unless a control needs ours."""
    from stepwell import DataLoader

    workers = int(os.environ["LEDGER_WORKERS"])
    options: dict[str, Any] = {"batch_size": SIZE, "shuffle": True, "collate_fn": collated, "num_workers": workers}
    if workers:
        options |= {
            "prefetch_factor": int(os.environ["LEDGER_PREFETCH"]),
            "multiprocessing_context": os.environ["LEDGER_METHOD"],
            "persistent_workers": os.environ["LEDGER_PERSISTENT"] == "1",
        }
    if os.environ.get("LEDGER_CONTROL") == "unkeyed":
        return DataLoader(Augmented(), tail="partial", keyed=False, **options)
    return torch.utils.data.DataLoader(Augmented(), **options)


def count_what_was_handed_out() -> None:
    """The control: the position is that of the sampler, which runs ahead of the loop by what workers prefetch."""
    from stepwell.training.data.batches import Batches
    from stepwell.training.data.sampler import PlainSampler

    inner_iter, inner_saved, handed = PlainSampler.__iter__, Batches.saved, {}

    def iterate(self: PlainSampler) -> Iterator[Any]:
        at = handed["at"] = self._at
        for batch in inner_iter(self):
            at = handed["at"] = self.after(at)
            yield batch

    def saved(self: Batches, at: Any, **options: Any) -> Any:
        return inner_saved(self, handed.get("at", at), **options)

    PlainSampler.__iter__, Batches.saved = iterate, saved  # type: ignore[method-assign]


def main() -> None:
    os.setpgid(0, 0)  # so that a kill takes the workers too, as the end of a container does
    from stepwell import Checkpointer, Every

    if os.environ.get("LEDGER_CONTROL") == "prefetched":
        count_what_was_handed_out()
    accumulate, pace = int(os.environ["LEDGER_ACCUMULATE"]), float(os.environ["LEDGER_PACE"])
    ledger = os.open(sys.argv[1] + ".ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(line: Any) -> None:
        os.write(ledger, (json.dumps(line) + "\n").encode())

    torch.set_num_threads(1)
    torch.manual_seed(1)
    numpy.random.seed(2)
    random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = make_loader()
    ckpt = Checkpointer(sys.argv[1], policy=Every(steps=2), data=loader, seed=7, model=model, optimizer=optimizer)
    ckpt.restore()
    note({"resumed": ckpt.status().step})
    done = ckpt.status().step
    used: list[Any] = []
    for epoch in ckpt.epochs(EPOCHS):
        for batch in ckpt.data:
            samples = [int(value) for value in batch[:, 0]]
            used.append([epoch, samples, hashlib.sha256(batch.numpy().tobytes()).hexdigest()])
            (model(batch / COUNT).pow(2).mean() / accumulate).backward()
            if len(used) < accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            note({"step": done, "used": used})
            used = []
            if pace:
                time.sleep(pace)  # the length of a step, as a larger model would have it


if __name__ == "__main__":
    main()
