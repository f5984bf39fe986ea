"""One rank that saves with torch.distributed.checkpoint, goes on from that under stepwell, or loads through our reader.

    dcp_rank.py WHERE --task save|write|go-on|load|stages --kind plain|ddp|fsdp|tp --folder DIR --style raw|named|flat

Writes WHERE.<task>.json (rank 0): digests of all full tensors, under the names of the plain model. `stages`: each rank
has one layer of the model, as in a pipeline, and saves that. `write`: as save, through our writer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks.sharded import Net, digest, named_tensors, spread, train_step


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("where")
    add("--task", required=True, choices=["save", "write", "go-on", "load", "stages"])
    add("--kind", default="plain", choices=["plain", "ddp", "fsdp", "tp"])
    add("--folder")
    add("--style", default="raw", choices=["raw", "named", "flat"])
    add("--width", type=int, default=24)
    add(
        "--keep-plans",
        action="store_true",
        help="write: two checkpoints, the planner keeps its plans",
    )
    return parser.parse_args()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, style: str) -> dict[str, Any]:
    """As people give it to DCP: the objects' own state dicts, or those of DCP's helper."""
    if style == "raw":
        plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        return {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
    flatten = StateDictOptions(flatten_optimizer_state_dict=style == "flat")
    found, state = get_state_dict(model, optimizer, options=flatten)
    return {"model": found, "optimizer": state}


def save(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for step in range(3):
        train_step(model, optimizer, step, args)
    if args.task == "write":
        from stepwell.adapters.dcp_writer import StepwellWriter

        def write(step: int) -> None:
            planner = DefaultSavePlanner(enable_plan_caching=args.keep_plans)
            writer = StepwellWriter(args.where, step=step)
            dcp.save(state_of(model, optimizer, args.style), storage_writer=writer, planner=planner)

        if args.keep_plans:
            write(2)
            train_step(model, optimizer, 3, args)
        write(3)
    else:
        dcp.save(state_of(model, optimizer, args.style), checkpoint_id=args.folder)
    return {"saved": digest(named_tensors(model, optimizer))}


def go_on(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    import stepwell
    from stepwell.adapters.dcp import load_into

    ckpt = stepwell.Checkpointer(args.where, model=model, optimizer=optimizer, policy=stepwell.Never(), grace=None)
    if not ckpt.restore():
        load_into(args.folder, model=model, optimizer=optimizer)
    result = {"loaded": digest(named_tensors(model, optimizer))}
    first = ckpt.status().step
    for step in range(first, first + 2):
        train_step(model, optimizer, step, args)
        ckpt.step()
    ckpt.save().wait()
    result |= {"saved": digest(named_tensors(model, optimizer)), "step": ckpt.status().step}
    ckpt.close(save=False)
    return result


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from stepwell.adapters.dcp import StepwellReader, parameter_names

    train_step(model, optimizer, 0, args)  # DCP loads into tensors that are there
    names = None if args.style == "raw" else {"optimizer": parameter_names(model, optimizer)}
    state = state_of(model, optimizer, args.style)
    dcp.load(state, storage_reader=StepwellReader(args.where, names=names))
    if args.style == "raw":
        optimizer.load_state_dict(state["optimizer"])
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"loaded": digest(named_tensors(model, optimizer))}


def stages(args: argparse.Namespace) -> None:
    import stepwell

    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 2 + rank)})
    nn.init.constant_(model[f"stage{rank}"].weight, rank)
    ckpt = stepwell.Checkpointer(args.where, model=model, policy=stepwell.Never(), grace=None)
    ckpt.restore()
    ckpt.save().wait()
    ckpt.close(save=False)


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    args = options()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if args.task == "stages":
        stages(args)
        dist.destroy_process_group()
        return
    result = work(args)
    # DDP may not be the last to hold the group: it lets go of it with the GIL held, and waits for a thread of gloo
    # that waits for the GIL. One rank in a few dozen never ended.
    gc.collect()
    if dist.get_rank() == 0:
        Path(f"{args.where}.{args.task}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def work(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed({"save": 1, "write": 1, "go-on": 2, "load": 3}[args.task])
    model = spread(Net(args.width, 50, 2), args.kind)
    rates = {"save": 1e-2, "write": 1e-2, "go-on": 1.0, "load": 2.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates[args.task])
    result = {"save": save, "write": save, "go-on": go_on, "load": load}[args.task](args, model, optimizer)
    return result | {"lr": optimizer.param_groups[0]["lr"]}


if __name__ == "__main__":
    main()
