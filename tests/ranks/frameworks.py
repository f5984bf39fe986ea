"""Training in the ways that spread a state over ranks, other than DDP (trainer.py).

    frameworks.py WHERE --kind zero|pipeline|fsdp1|fsdp2|hsdp|mesh|drift [--stop-at STEP]

Each launch goes on from what it finds and ends at --steps. With --stop-at it waits in that step to be killed. At the
end WHERE.end.<rank> holds a digest of each tensor that this rank has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks import hooks

WIDTH = 12


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("where")
    add("--kind", default="zero")
    add("--steps", type=int, default=16)
    add("--every", type=int, default=2)
    add("--stop-at", type=int, default=0)
    add("--grace", type=float)
    add("--sleep", type=float, default=0.02)
    return parser.parse_args()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 31), nn.LayerNorm(31), nn.GELU(), nn.Linear(31, WIDTH))


class Zero:
    """DDP, and an optimizer of which each rank has the state of some parameters."""

    def __init__(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(net(), find_unused_parameters=True)
        self.optimizer: Any = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.tracked: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def step(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        nn.functional.mse_loss(self.model(inputs), wanted).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": value.detach() for name, value in self.model.named_parameters()}
        inner = self.optimizer.optim
        for number, state in inner.state_dict()["state"].items():
            found |= {f"optimizer/{number}/{name}": value for name, value in state.items()}
        return found | {"rate": torch.tensor([group["lr"] for group in self.optimizer.param_groups])}


class Pipeline(Zero):
    """One stage on each rank: other parameters, under the same names, and other shapes at the ends."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(50 + rank)
        ends = (WIDTH if rank == 0 else 20, WIDTH if rank == size - 1 else 20)
        self.model = nn.Sequential(nn.Linear(*ends), nn.Tanh())  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}

    def step(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        given = inputs
        if rank > 0:
            given = torch.empty(len(inputs), 20)
            dist.recv(given, rank - 1)
            given.requires_grad_()
        made = self.model(given)
        if rank < last:
            dist.send(made.detach().contiguous(), rank + 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, rank + 1)
            made.backward(gradient)
        else:
            nn.functional.mse_loss(made, wanted).backward()
        if rank > 0:
            assert given.grad is not None
            dist.send(given.grad, rank - 1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": value.detach() for name, value in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{number}/{name}": value for name, value in state.items()}
        return {name: getattr(value, "_local_tensor", value) for name, value in found.items()}


class Fsdp1(Pipeline):
    """Flat pieces of all parameters on each rank."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        from stepwell.adapters.fsdp1 import Sharded

        self.model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked = {"model": Sharded(self.model), "optimizer": self.optimizer}

    def step(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        nn.functional.mse_loss(self.model(inputs), wanted).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Hsdp(Fsdp1):
    """FSDP2 on a 2-D mesh: shards in one direction, copies in the other."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
        self.model = net()  # type: ignore[assignment]
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}


class Fsdp2(Hsdp):
    """Shards on all ranks; rows that the ranks do not divide evenly."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = net()  # type: ignore[assignment]
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}


class Mesh(Hsdp):
    """Tensor parallel in one direction, FSDP2 in the other."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shards", "tensor"))
        self.model = nn.Sequential(nn.Linear(WIDTH, 30), nn.GELU(), nn.Linear(30, WIDTH))  # type: ignore[assignment]
        parallelize_module(self.model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["shards"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}


class Drift(Fsdp2):
    """Beside it a tensor that is the same on all ranks, and from the fourth step on is not."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = {"values": torch.zeros(1000), "steps": 0}
        self.tracked["beside"] = self.beside

    def step(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        super().step(inputs, wanted)
        self.beside["steps"] += 1
        self.beside["values"] += 1 + (dist.get_rank() if self.beside["steps"] > 3 else 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "beside": self.beside["values"]}  # type: ignore[dict-item]


KINDS: dict[str, type[Zero]] = {
    "drift": Drift,
    "zero": Zero,
    "pipeline": Pipeline,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "hsdp": Hsdp,
    "mesh": Mesh,
}


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    args = options()
    hooks.install(Path(args.where).parent)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    kind, rank = KINDS[args.kind](), dist.get_rank()
    import stepwell

    policy = stepwell.Every(steps=args.every)
    ckpt = stepwell.Checkpointer(args.where, policy=policy, seed=7, grace=args.grace, track=kind.tracked)
    ckpt.restore()
    resumed = ckpt.status().step
    for step in range(resumed + 1, args.steps + 1):
        part = {"pipeline": 0, "mesh": rank // 2}.get(args.kind, rank)  # ranks of one replica have the same data
        chance = torch.Generator().manual_seed(1000 * step + part)
        inputs, wanted = torch.randn(2, 6, WIDTH, generator=chance)
        kind.step(inputs, wanted)
        hooks.settle(ckpt, step - resumed)
        time.sleep(args.sleep)
        ckpt.step()
        if step == args.stop_at:
            Path(f"{args.where}.stopped.{os.environ['RANKS_LAUNCH']}.{rank}").touch()
            while True:
                time.sleep(1)
    ckpt.close()
    digests = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for name, value in kind.tensors().items()
    }
    Path(f"{args.where}.end.{rank}").write_text(json.dumps({"resumed": resumed, "digests": digests}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
