"""A small training run through CheckFreq's interface that tests drive batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode
from stepwell.storage.store import catalog
from stepwell.storage.store.paths import RunPaths
from tests.training.loop.small import Numbers, same

__all__ = ["Small", "same"]


class Small:
    """Model, optimizer, loader, manager and iterator over one directory."""

    def __init__(
        self,
        where: Path,
        *,
        mode: CFMode,
        restore: str = "",
        seed: int = 0,
        optimizer_name: str = "optimizer",
        is_wrapped: bool = True,
        loader: Any = None,
        overwrite: bool = True,
        keep_epoch_chk: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.where = where
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, betas=(0.8, 0.99))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.99**step)
        chk = CFCheckpoint(model=self.model, scheduler=self.scheduler, **{optimizer_name: self.optimizer})
        self.manager = CFManager(str(where), chk, mode=mode, overwrite=overwrite, keep_epoch_chk=keep_epoch_chk)
        self.restored = self.manager.restore() if restore == "before" else None
        self.loader = DataLoader(Numbers(), batch_size=4, shuffle=True) if loader is None else loader
        if is_wrapped:
            self.iterator = CFIterator(self.loader, cf_manager=self.manager, **options)
        if restore == "after":
            self.restored = self.manager.restore()
        self.seen: list[tuple[int, list[int]]] = []

    def update(self, batch: torch.Tensor) -> None:
        loss = self.model(batch / 24).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.manager.weight_update()
        self.scheduler.step()

    def train(self, *, epochs: int = 99, batches: int | None = None) -> None:
        """Until so many epochs of the run are done, or so many batches more."""
        while self.iterator.state_dict()["epoch"] < epochs and not self.iterator.exit:
            epoch = self.iterator.state_dict()["epoch"]
            for batch in self.iterator:
                self.seen.append((epoch, [int(value) for value in batch[:, 0]]))
                self.update(batch)
                batches = None if batches is None else batches - 1
                if batches == 0:
                    return

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def state_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self.model.state_dict().values())

    def entries(self) -> list[catalog.Entry]:
        """Committed checkpoints, oldest first."""
        return sorted((e for e in catalog.scan(RunPaths(self.where)) if e.is_committed), key=lambda entry: entry.id)

    def steps_on_disk(self) -> list[int]:
        return sorted({entry.id.step for entry in self.entries()})
