"""A model of which each rank holds a part: restored, digested, trained for some steps, saved, digested again.

    sharded.py WHERE --kind plain|ddp|fsdp|tp [options]   writes WHERE.<launch>.json (rank 0) and WHERE.<launch>.<rank>

`fsdp` is FSDP2 over all ranks; `tp` is tensor parallel within pairs of ranks and FSDP2 across the pairs; both also on
one rank. Tensors are chosen to be awkward: more ranks than rows, rows that do not divide, a buffer on every rank.
Digests are of the full tensors, whatever part of them a rank has, so that all kinds must give the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks import hooks

ROWS = 12
"""Of a global batch; all world sizes here divide it."""
CLASSES = 7


class Block(nn.Module):
    """Two layers that tensor parallelism cuts by columns and by rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """`pair` has two rows, fewer than there are ranks; `head` has seven."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.pair = nn.Parameter(torch.ones(2, 3))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1.0
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.pair.sum()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("where")
    add("--kind", required=True, choices=["plain", "ddp", "fsdp", "tp"])
    add("--steps", type=int, default=3)
    add("--width", type=int, default=24)
    add("--hidden", type=int, default=50)
    add("--depth", type=int, default=2)
    add("--foreach", action="store_true", help="the optimizer changes bytes without a version")
    add("--large", action="store_true", help="no rank ever has the whole model, so that large ones fit")
    add("--without-stepwell", action="store_true")
    return parser.parse_args()


def spread(net: Net, kind: str) -> nn.Module:
    """Cut the model up as `kind` says."""
    world = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=True)
    if kind == "plain":
        return net
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    else:
        across = 2 if world > 1 else 1
        both = init_device_mesh("cpu", (world // across, across), mesh_dim_names=("dp", "tp"))
        for block in net.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["dp"]
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give a model from the meta device small numbers, which any part of it can have by itself."""
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.normal_(std=0.01)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything of model and optimizer, under the names of the plain model."""
    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    found: dict[str, torch.Tensor] = {name: parameter for parameter, name in names.items()}
    found |= {name.removeprefix("module."): value for name, value in model.named_buffers()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]}/{key}": value for key, value in state.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Collective: of each full tensor, its shape and the hash of its bytes. On rank 0; nothing on the others."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            found[name] = f"{tuple(full.shape)} {hashlib.sha256(full.contiguous().numpy().tobytes()).hexdigest()}"
    return found


def local_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """What this rank holds: the least it has to read."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, args: argparse.Namespace) -> float:
    """One step on this rank's rows of a batch that depends on the step alone. The loss over all rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ROWS, args.width, generator=generator)
    wanted = torch.randint(CLASSES, (ROWS,), generator=generator)
    replicas, replica = dist.get_world_size(), dist.get_rank()
    if args.kind == "tp" and replicas > 1:  # ranks of a pair work on the same rows
        replicas, replica = replicas // 2, replica // 2
    rows = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)
    loss = nn.functional.cross_entropy(model(inputs[rows]), wanted[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    args = options()
    hooks.install(Path(args.where).parent)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with torch.device("meta" if args.large else "cpu"):
        net = Net(args.width, args.hidden, args.depth)
    model = spread(net, args.kind)
    if args.large:
        fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=args.foreach)
    result: dict[str, Any] = {"restored": None, "losses": []}
    ckpt = None
    if not args.without_stepwell:
        import stepwell

        ckpt = stepwell.Checkpointer(
            args.where, model=model, optimizer=optimizer, policy=stepwell.Never(), seed=7, grace=None
        )
        if ckpt.restore():
            result["restored"] = digest(named_tensors(model, optimizer))
    first = 0 if ckpt is None else ckpt.status().step
    for step in range(first, first + args.steps):
        result["losses"].append(train_step(model, optimizer, step, args))
        if ckpt is not None:
            ckpt.step()
    if ckpt is not None:
        ckpt.save().wait()
    result["saved"] = digest(named_tensors(model, optimizer))
    result["step"] = first + args.steps
    launch, rank = os.environ["RANKS_LAUNCH"], dist.get_rank()
    own = {"local_bytes": local_bytes(named_tensors(model, optimizer)), "pid": os.getpid()}
    Path(f"{args.where}.{launch}.{rank}").write_text(json.dumps(own))
    if rank == 0:
        Path(f"{args.where}.{launch}.json").write_text(json.dumps(result))
    if ckpt is not None:
        ckpt.close(save=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
