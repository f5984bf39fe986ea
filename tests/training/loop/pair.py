"""Two networks that train in turn, each with a Checkpointer of its own; told to leave in the middle of an iteration.

Usage: pair.py DIRECTORY     `idle` as a second argument: the second one never steps again
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import stepwell


def make(where: Path, **options: object) -> tuple[stepwell.Checkpointer, torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = stepwell.Checkpointer(where, model=model, optimizer=optimizer, policy=stepwell.Never(), **options)  # type: ignore[arg-type]
    return ckpt, model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    where, is_idle = Path(sys.argv[1]), sys.argv[2:] == ["idle"]
    one, model, optimizer = make(where / "one", data=[torch.ones(1)] * 100)
    other, other_model, other_optimizer = make(where / "other")
    print("restored", one.restore(), other.restore(), one.status().step, other.status().step, flush=True)
    for number, _ in enumerate(one.data):
        update(model, optimizer)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if not (is_idle and number > 2):
            update(other_model, other_optimizer)
            other.step()
    print("done", flush=True)


if __name__ == "__main__":
    main()
