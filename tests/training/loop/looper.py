"""A training loop that ends in many ways, for `test_matrix`: one cell of the matrix is one set of wishes.

Usage: looper.py DIRECTORY JSON     the final state is printed as one line, `final {...}`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import stepwell

EPOCHS, BATCHES, SIZE = 3, 6, 2
POLICIES = {
    "never": stepwell.Never(),
    "steps": stepwell.Every(steps=1),
    "epochs": stepwell.Every(epochs=1),
}


class Net(torch.nn.Module):
    """Something that has a buffer which each forward changes, and draws from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class Looper:
    """One process of one run."""

    def __init__(self, where: Path, wishes: dict[str, Any]) -> None:
        self.kind, self.source = wishes["kind"], wishes["source"]
        self.event, self.place, self.at = wishes.get("event"), wishes.get("place"), wishes.get("at", 0)
        self.epochs = wishes.get("epochs", EPOCHS)
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.seen: list[Any] = []
        self.values = torch.randn(BATCHES * SIZE, 4, generator=torch.Generator().manual_seed(1))
        self.done = self.kill_at = 0
        data = DataLoader(self.rows(), SIZE, shuffle=True) if self.source == "data" else None
        self.ckpt = stepwell.Checkpointer(
            where,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seen=self.seen,
            data=data,
            policy=POLICIES[wishes.get("policy", "never")],
            keep=3,
        )

    def rows(self) -> TensorDataset:
        return TensorDataset(torch.arange(BATCHES * SIZE), self.values)

    def batches(self, epoch: int) -> Iterator[Any]:
        if self.source == "data":
            yield from enumerate(self.ckpt.data, self.ckpt.data.index)
            return
        order = torch.Generator().manual_seed(epoch)
        before = self.ckpt.data.index
        for number, batch in enumerate(DataLoader(self.rows(), SIZE, shuffle=True, generator=order)):
            if number >= before:
                yield number, batch

    def run(self) -> None:
        for epoch in self.ckpt.epochs(self.epochs):
            is_left = False
            numbered = self.batches(epoch)
            for number, (rows, x) in numbered:
                self.model(x).pow(2).mean().backward()
                self.seen.append([epoch, *rows.tolist()])
                if self.kind != "accumulation" or number % 4 == 3:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.source == "own":
                    self.ckpt.step()
                self.done += 1
                if self.done == self.kill_at:
                    self.ckpt.wait()  # or it would be chance which checkpoint is the newest
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.done == self.at and self.happens("body"):
                    is_left = True
                    break
            if is_left:
                numbered.close()
                break
            if self.tail(epoch):
                break

    def tail(self, epoch: int) -> bool:
        """The code after the inner loop. True: leave the outer one."""
        if self.kind == "scheduler":
            if self.event == "save" and epoch == 1 and self.place == "tail":
                self.happens("tail")  # the scheduler's step comes after the save
                self.scheduler.step()
                return False
            self.scheduler.step()
        if self.kind == "validation":
            self.model.eval()
            with torch.no_grad():
                self.model(self.values + torch.rand_like(self.values))
            self.model.train()
        if self.kind == "early stop" and epoch == 1:
            self.ckpt.finish()
            return True
        return epoch == 1 and self.happens("tail")

    def happens(self, place: str) -> bool:
        """The event of this cell. True: leave the loop by break."""
        if place != self.place:
            return False
        if self.event == "save":
            self.ckpt.save()
            self.kill_at = self.done + (BATCHES if place == "body" else 2)
        elif self.event in ("policy", "kill"):
            with contextlib.suppress(stepwell.PersistError):
                self.ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.event == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.event == "exit":
            sys.exit(3)
        elif self.event == "exception":
            raise RuntimeError("boom")
        return self.event == "break"

    def final(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            for value in state.values():
                digest.update(value.numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return {"seen": self.seen, "state": digest.hexdigest(), "scheduler": self.scheduler.state_dict()}


def main() -> None:
    where, wishes = Path(sys.argv[1]), json.loads(sys.argv[2])
    looper = Looper(where, wishes)
    if wishes["with"]:
        with looper.ckpt:
            looper.ckpt.restore()
            looper.run()
    else:
        looper.ckpt.restore()
        looper.run()
    print("final", json.dumps(looper.final()), flush=True)


if __name__ == "__main__":
    main()
