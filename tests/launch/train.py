"""A worker of one of the nodes: trains a little, checkpoints into the node's cache, and notes every step for its node.

LAUNCH_FOLDER is the test's folder, LAUNCH_NAME the node's name. `crash.NAME` in the folder makes the workers of that
node end once, in their next step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stepwell

FOLDER, NAME = Path(os.environ.get("LAUNCH_FOLDER", ".")), os.environ.get("LAUNCH_NAME", "")
SAMPLES, FEATURES, BATCH = 96, 8, 2


def note(**facts: Any) -> None:
    """One line in the node's log; one write, so that a kill leaves no half of it."""
    with open(FOLDER / f"steps.{NAME}.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps({"time": time.monotonic(), **facts}).encode() + b"\n")


def crash_if_told() -> None:
    try:
        (FOLDER / f"crash.{NAME}").unlink()
    except FileNotFoundError:
        return
    os._exit(3)


def main() -> None:
    epochs, pace = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(2))
    loader = stepwell.DataLoader(torch.utils.data.TensorDataset(data), BATCH, shuffle=True)
    # In STEPWELL_CACHE, which is lost with the node; the undisturbed run has none.
    levels = [stepwell.Node(), stepwell.Shared(every=5)] if "STEPWELL_CACHE" in os.environ else None
    tracked = {"model": model, "optimizer": optimizer}
    ckpt = stepwell.Checkpointer(
        FOLDER / "run", policy=stepwell.Every(steps=2), levels=levels, data=loader, seed=7, **tracked
    )
    ckpt.restore()
    note(
        begin=ckpt.status().step,
        rank=rank,
        world=dist.get_world_size(),
        lineage=ckpt.status().lineage,
        pid=os.getpid(),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
    for _ in ckpt.epochs(epochs):
        for (batch,) in ckpt.data:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            together = torch.cat([flat, loss.detach().reshape(1)]) / dist.get_world_size()
            dist.all_reduce(together)
            offset = 0
            for parameter in model.parameters():
                parameter.grad.copy_(together[offset : offset + parameter.numel()].reshape(parameter.shape))
                offset += parameter.numel()
            optimizer.step()
            optimizer.zero_grad()
            note(step=ckpt.status().step + 1, rank=rank, loss=together[-1].item())
            crash_if_told()
            time.sleep(pace)
    note(end=ckpt.status().step, rank=rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
