"""One rank of the experiments: the real parameters of ResNet-50 or EDSR with momentum, and an accelerator that sleeps.

    python trainer.py '{"way": "pairs", "model": "resnet50", ...}'      RANK, WORLD_SIZE, MASTER_* as usual

An iteration takes `seconds` on every rank, whatever the number of ranks, as it would on an accelerator: the rank
sleeps, then updates its parameters for real, and all meet in an all-reduce. An epoch has `images` / ranks iterations:
epochs become shorter with more ranks, as in the original (strong scaling). One checkpoint at the end of each.

none      no checkpoints
root      rank 0 saves everything with torch.save and fsync to the shared place, the others wait
single, pairs, partner, xor, rs    stepwell with levels: the node's cache, every tenth to the shared place
shared    stepwell without levels
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


def resnet50() -> list[tuple[int, ...]]:
    """Shapes of all its parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            convolutions += [(4 * inner, width, 1, 1)] if block == 0 else []
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


def edsr() -> list[tuple[int, ...]]:
    """Shapes of EDSR's full network, 32 blocks of 256 features, for doubling."""
    shapes: list[tuple[int, ...]] = [(256, 3, 3, 3), (256,)]
    shapes += [shape for _ in range(65) for shape in ((256, 256, 3, 3), (256,))]
    return [*shapes, (1024, 256, 3, 3), (1024,), (3, 256, 3, 3), (3,)]


WAYS = {
    "single": stepwell.Single(),
    "pairs": stepwell.Pairs(),
    "partner": stepwell.Partner(),
    "xor": stepwell.Xor(8),
    "rs": stepwell.ReedSolomon(8, 2),
}


class Root:
    """The baseline: rank 0 saves all, the others wait; at a restart rank 0 loads and sends."""

    def __init__(self, folder: Path, model: torch.nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.model, self.optimizer = folder / "root.pt", model, optimizer

    def save(self) -> None:
        if dist.get_rank() == 0:
            partial = self.path.with_suffix(".partial")
            with partial.open("wb") as file:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        dist.barrier()

    def restore(self) -> bool:
        if not self.path.exists():
            return False
        if dist.get_rank() == 0:
            state = torch.load(self.path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        for parameter in self.model:
            dist.broadcast(parameter.data, 0)
            moment = self.optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            dist.broadcast(moment, 0)
        return True


def main() -> None:
    what: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    shapes = {"resnet50": resnet50, "edsr": edsr}[what["model"]]()
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape) * 0.01) for shape in shapes)
    optimizer = torch.optim.SGD(model, lr=0.1, momentum=0.9, foreach=False)
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-4)
    way, shared = what["way"], Path(what["shared"])
    shared.mkdir(parents=True, exist_ok=True)
    ckpt: stepwell.Checkpointer | None = None
    root = Root(shared, model, optimizer) if way == "root" else None
    dist.barrier()
    started = time.monotonic()
    is_back = False
    if way in WAYS or way == "shared":
        cache = Path(what["caches"]) / f"node.{rank}"
        levels = None if way == "shared" else [stepwell.Node(cache, protect=WAYS[way]), stepwell.Shared(every=10)]
        tracked = {"model": model, "optimizer": optimizer}
        ckpt = stepwell.Checkpointer(
            shared / "run", levels=levels, policy=stepwell.Every(steps=what["every"]), grace=None, **tracked
        )
        is_back = ckpt.restore()
    elif root is not None:
        is_back = root.restore()
    dist.barrier()
    restored = time.monotonic() - started
    times, saves, began_processor = [], [], time.process_time()
    for _ in range(what["epochs"]):
        for _ in range(what["every"]):
            began = time.monotonic()
            time.sleep(what["seconds"])
            optimizer.step()
            dist.all_reduce(torch.zeros(1))
            if ckpt is not None:
                ckpt.step()
            times.append(time.monotonic() - began)
        if root is not None:
            began = time.monotonic()
            root.save()
            saves.append(time.monotonic() - began)
            times[-1] += saves[-1]
        if what.get("wait") and ckpt is not None:
            ckpt.wait(300)
    status = None if ckpt is None else ckpt.status()
    facts = {"rank": rank, "world": world, "restored": restored, "is_back": is_back, "times": times, "saves": saves}
    facts["nbytes"] = 2 * sum(parameter.numel() * 4 for parameter in model)
    facts["processor"] = {"trainer": time.process_time() - began_processor}
    if ckpt is not None:
        fields = Path(f"/proc/{ckpt.status().agent_pid}/stat").read_text().rpartition(")")[2].split()
        facts["processor"]["agent"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    facts["degraded"] = None if status is None else status.degraded
    (Path(what["out"]) / f"rank.{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    if what.get("crash"):
        os.kill(os.getpid(), 9)
    if ckpt is not None:
        ckpt.close(save=False)


if __name__ == "__main__":
    main()
