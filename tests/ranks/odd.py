"""A small run of several ranks with whatever a test wants to be odd about it. An all_reduce keeps them in step.

    odd.py WHERE JSON     beside WHERE, at the end: WHERE.<launch>.<rank> with what came back and what there is

Options: steps, every, seconds, never, memory, host_memory, keep, grace    of the Checkpointer and the loop
         drift STEP     a tracked tensor, equal on all ranks so far, is each rank's own from this step on
         extra STEP     rank 0 alone tracks one more tensor from this step on
         frozen         the first layer is not trained
         save [STEPS]   all ranks call save() there;    named STEP: and one of these has a name
         alone {STEP: RANK}     this rank alone calls save() there;    early: in the body, before the step is over
         wait           and waits for it at once;    data: batches come from ckpt.data
         other POLICY   what rank 1 was given instead, as Never() or Every(steps=7)
         unlike RANK    this rank's model has another shape
         mesh KIND      four ranks with FSDP2: `stages`, two models, each over two; `copies`, one, twice over two
         restore {}     arguments of restore();    fail RANK: its data is refused when the run is opened
         stop STEP:PATH as in trainer.py;    pause SECONDS in each step;    late RANK:SECONDS before it closes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import stepwell
from tests.ranks import hooks

WIDTH = 64


def digest(tensor: torch.Tensor) -> str:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


class Refusing:
    """Data that one rank cannot open."""

    def __len__(self) -> int:
        raise RuntimeError("this rank has no data")

    def __iter__(self) -> Any:
        return iter(())


def make(wishes: dict[str, Any], rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    mesh = wishes.get("mesh")
    torch.manual_seed(3 + (rank // 2 if mesh == "stages" else 0))
    width = WIDTH + (1 if wishes.get("unlike") == rank else 0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    if wishes.get("frozen"):
        model[0].requires_grad_(False)
    if mesh is not None:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        fully_shard(model, mesh=both["shard"] if mesh == "stages" else both)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    more: dict[str, Any] = {"seen": torch.zeros(300), "extra": {}}
    return model, optimizer, more


def options(wishes: dict[str, Any]) -> dict[str, Any]:
    policy: Any = stepwell.Every(steps=wishes.get("every", 3))
    if "seconds" in wishes:
        policy = stepwell.Every(seconds=wishes["seconds"])
    if wishes.get("never"):
        policy = stepwell.Never()
    if wishes.get("auto"):
        policy = stepwell.Auto()
    if "other" in wishes and dist.get_rank() == 1:
        named = {name: getattr(stepwell, name) for name in ("Auto", "Every", "Never")}
        policy = eval(wishes["other"], named)  # of a test's own command line
    memory = stepwell.Every(steps=wishes["memory"]) if "memory" in wishes else None
    kept = {name: wishes[name] for name in ("host_memory", "keep", "grace") if name in wishes}
    return {"policy": policy, "memory": memory, "grace": None, **kept}


def stand_still(wishes: dict[str, Any], step: int, rank: int) -> None:
    when, _, path = wishes.get("stop", "0:").partition(":")
    if int(when) == step and not os.path.exists(path):
        Path(f"{path}.{os.environ['RANKS_LAUNCH']}.{rank}").touch()
        while not os.path.exists(path):
            time.sleep(0.005)


def main() -> None:
    where, wishes = Path(sys.argv[1]), json.loads(sys.argv[2])
    hooks.install(where.parent)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model, optimizer, more = make(wishes, rank)
    torch.manual_seed(10 + rank)
    tracked = {"model": model, "optimizer": optimizer, "more": more}
    data: dict[str, Any] = {"data": Refusing()} if wishes.get("fail") == rank else {}
    if wishes.get("data"):
        data["data"] = torch.utils.data.DataLoader(range(400), batch_size=2)
    ckpt = stepwell.Checkpointer(where, **options(wishes), **data, **tracked)
    report: dict[str, Any] = {}
    path = Path(f"{where}.{os.environ['RANKS_LAUNCH']}.{rank}")
    try:
        report["restored"] = ckpt.restore(**wishes.get("restore", {}))
        report["resumed"] = ckpt.status().step
        report["found"] = {name: digest(value) for name, value in model.state_dict().items()}
        report["seen found"] = more["seen"][:2].tolist()
        train(wishes, ckpt, model, optimizer, more, report)
    except stepwell.StepwellError as error:
        report["error"] = [type(error).__name__, str(error)]
    except SystemExit as error:
        report["left"] = error.code
        raise
    finally:
        report |= {name: digest(value) for name, value in model.state_dict().items()}
        report |= {"seen": digest(more["seen"]), "generator": digest(torch.get_rng_state()), "step": ckpt.status().step}
        path.write_text(json.dumps(report))
        if "error" in report:
            os._exit(3)  # the others may wait in a collective of training


def train(
    wishes: dict[str, Any],
    ckpt: stepwell.Checkpointer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    more: dict[str, Any],
    report: dict[str, Any],
) -> None:
    rank, alone = dist.get_rank(), []
    batches = iter(ckpt.data) if wishes.get("data") else None
    for step in range(ckpt.status().step + 1, wishes.get("steps", 12) + 1):
        if batches is not None:
            next(batches)
        inputs = torch.randn(4, model[0].in_features)
        model(inputs).pow(2).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None and "mesh" not in wishes:
                dist.all_reduce(parameter.grad)
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        more["seen"] += 1 + (rank if wishes.get("drift", 1 << 30) <= step else 0)
        if rank == 0 and wishes.get("extra", 1 << 30) <= step:
            more["extra"]["best"] = torch.full((50,), float(step))
        if step in wishes.get("save", []):
            handle = ckpt.save(name="kept" if step == wishes.get("named") else None)
            report.setdefault("handles", []).append(handle)
        time.sleep(wishes.get("pause", 0.01))
        is_alone = wishes.get("alone", {}).get(str(step)) == rank
        if is_alone and wishes.get("early"):
            alone.append(ckpt.save())
        ckpt.step()
        if is_alone and not wishes.get("early"):
            alone.append(ckpt.save())
            if wishes.get("wait"):
                with contextlib.suppress(stepwell.PersistError):  # it is in the report
                    alone[-1].wait()
        stand_still(wishes, step, rank)
    late, _, seconds = wishes.get("late", "-1:0").partition(":")
    if int(late) == rank:
        time.sleep(float(seconds))
    handles = report.pop("handles", [])
    report["saved"] = [handle.wait(60) for handle in handles]
    report["alone"] = [str(handle.upload_completion.exception(60)) for handle in alone]
    ckpt.close()


if __name__ == "__main__":
    main()
