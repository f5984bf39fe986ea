"""A small real training script whose checkpoints have everything in them that the command line must cope with.

Tied weights, frozen parameters (a file of their own), BatchNorm, bf16 and complex buffers, an empty one, Adam, and a
tracked dict with values of many types. Saves exactly at the steps it is told, so that tests know what is there.
"""

from __future__ import annotations

import argparse
import enum
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import torch


class Phase(enum.Enum):
    WARM_UP = 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(6, 6).requires_grad_(False)
        self.encoder = torch.nn.Linear(6, 6, bias=False)
        self.norm = torch.nn.BatchNorm1d(6)
        self.decoder = torch.nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("low", torch.linspace(-1, 1, 5).to(torch.bfloat16))
        self.register_buffer("turns", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.norm(self.encoder(self.base(x))))
        return out


def notes() -> dict[Any, Any]:
    return {
        "phase": Phase.WARM_UP,
        "seen": frozenset({1, 2}),
        "recent": deque([1.5, 2.5], maxlen=4),
        "array": numpy.arange(6, dtype=numpy.int64).reshape(2, 3),
        "dates": numpy.array(["2024-01-01"], dtype="<M8[D]"),
        "number": numpy.float32(0.5),
        "tuple": (1, None, True, "text"),
        "limits": [float("inf"), 2**70, 1 + 2j, b"bytes"],
        3: "an int key",
        (1, 2): torch.ones(2, dtype=torch.float16),
    }


def main() -> None:
    import stepwell

    options = argparse.ArgumentParser()
    options.add_argument("where")
    options.add_argument("--until", type=int, default=0)
    options.add_argument("--save", default="", help="steps, with commas")
    options.add_argument("--name", default="", help="step:name")
    options.add_argument("--attach", type=int, default=-1)
    options.add_argument("--nan-at", type=int, default=-1)
    options.add_argument("--restore-step", type=int)
    options.add_argument("--every-step", action="store_true", help="save after each step, without waiting")
    options.add_argument("--until-file", type=Path, help="train until this file is there")
    given = options.parse_args()
    saves = {int(step) for step in given.save.split(",") if step}

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ckpt = stepwell.Checkpointer(
        given.where,
        policy=stepwell.Every(steps=1) if given.every_step else stepwell.Never(),
        keep=2 if given.every_step else 50,
        seed=5,
        track={"model": model, "optimizer": optimizer, "notes": notes()},
    )
    ckpt.restore(step=given.restore_step)
    print("open", ckpt.status().step, ckpt.status().agent_pid, os.getpid(), flush=True)
    while not (given.until_file.exists() if given.until_file else ckpt.status().step >= given.until):
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = ckpt.status().step + 1
        if step == given.nan_at:
            with torch.no_grad():
                model.encoder.weight[0, 0] = float("nan")
        ckpt.step()
        if step in saves:
            name = given.name.partition(":")[2] if given.name.startswith(f"{step}:") else None
            files = {"vocabulary.txt": __file__} if step == given.attach else None
            ckpt.save(name=name, files=files).wait(60)
    ckpt.close(save=False)
    print("closed", ckpt.status().step, flush=True)


if __name__ == "__main__":
    main()
