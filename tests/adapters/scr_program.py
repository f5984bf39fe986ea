"""A program that follows SCR's documented flow: `scr_program.py FOLDER [options]`, one rank of it.

It goes on from what `have_restart` names, makes a checkpoint in every step, and writes what it saw to
FOLDER/result.<launch>.<rank>. What a rank wrote is a function of step and rank, so what it reads can be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stepwell.adapters import scr

PIECE = 1 << 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("folder", type=Path)
    add("--steps", type=int, default=5)
    add("--mpi", action="store_true")
    add("--horovod", action="store_true")
    add("--refuse", default="", help="STEP:RANK says that its output is not valid")
    add("--unwritten", default="", help="STEP:RANK routes a file that it does not write")
    add("--rename", default="", help="STEP:RANK begins another dataset than the others")
    add("--share", type=int, help="in this step all ranks write the same file")
    add("--misread", default="", help="STEP:RANK says that it cannot use what it read")
    add("--stay", action="store_true", help="after the last step wait to be killed, instead of finalize()")
    add("--same-name", action="store_true", help="every checkpoint has the same file names")
    add("--old-world", type=int, help="the number of ranks that wrote what is read; read the files of all of them")
    return parser.parse_args()


def folder_of(step: int, args: argparse.Namespace) -> str:
    return "newest" if args.same_name else f"ckpt.{step}"


def content(step: int, rank: int) -> bytes:
    return random.Random(f"{step} {rank}").randbytes(2 * PIECE + 1000 * rank + step)


def state(step: int, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {"step": step, "rank": rank, "weights": torch.randn(300, 7, generator=generator)}


def paths(step: int, rank: int, args: argparse.Namespace) -> dict[str, str]:
    base = f"{os.environ['SCR_PREFIX']}/{folder_of(step, args)}"
    return {
        "model": f"{base}/rank {rank}/model.pt",
        "bytes": f"{base}/data/{rank}.bin",
        "empty": f"{base}/{rank}.empty",
    }


def save(step: int, rank: int, args: argparse.Namespace) -> bool | str:
    try:
        scr.start_output(f"other.{step}" if args.rename == f"{step}:{rank}" else f"ckpt.{step}", scr.FLAG_CHECKPOINT)
    except RuntimeError as error:
        return str(error)
    if args.share == step:
        Path(scr.route_file(f"{os.environ['SCR_PREFIX']}/shared")).write_bytes(b"shared")
    routed = {kind: scr.route_file(path) for kind, path in paths(step, rank, args).items()}
    if rank != 3:  # one rank has a single file
        torch.save(state(step, rank), routed["model"])
        Path(routed["empty"]).write_bytes(b"")
    else:
        for kind in ("model", "empty"):
            Path(routed[kind]).write_bytes(b"x")
    if args.unwritten != f"{step}:{rank}":
        Path(routed["bytes"]).write_bytes(content(step, rank))
    return scr.complete_output(args.refuse != f"{step}:{rank}")


def is_right(step: int, rank: int, args: argparse.Namespace) -> bool:
    where = {kind: scr.route_file(path) for kind, path in paths(step, rank, args).items()}
    if Path(where["bytes"]).read_bytes() != content(step, rank):
        return False
    if rank == 3:
        return Path(where["model"]).read_bytes() == b"x"
    found, expected = torch.load(where["model"]), state(step, rank)
    return bool(torch.equal(found["weights"], expected["weights"])) and found["step"] == step


def load(rank: int, args: argparse.Namespace, seen: list[Any]) -> int:
    """The step to go on from; `seen`: every checkpoint that was offered, and what became of it."""
    while (name := scr.have_restart()) is not None:
        assert scr.start_restart() == name
        step = int(name.removeprefix("ckpt."))
        ranks = [rank] if args.old_world is None else range(args.old_world)
        right = all(is_right(step, other, args) for other in ranks)
        assert right, f"{name} is not what was written"
        taken = scr.complete_restart(args.misread != f"{step}:{rank}")
        seen.append([step, taken])
        if taken:
            return step
    return 0


def connect(args: argparse.Namespace) -> int:
    if args.mpi:
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.Get_rank())
    if args.horovod:
        import horovod.torch as hvd

        hvd.init()
        return int(hvd.rank())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        return dist.get_rank()
    return 0


def leave(place: Path, text: str) -> None:
    """For whoever looks: whole, or not there."""
    temporary = place.with_name(f"{place.name}.tmp")
    temporary.write_text(text)
    temporary.rename(place)


def main() -> None:
    args = options()
    rank = connect(args)
    launch = os.environ.get("RANKS_LAUNCH", "0")
    if nodes := os.environ.get("SCR_PROGRAM_NODES"):  # where the launcher gives all ranks one environment
        os.environ.update(json.loads(nodes)[rank])
    (args.folder / f"pid.{launch}.{rank}").write_text(str(os.getpid()))
    scr.init()
    seen: list[Any] = []
    start = load(rank, args, seen)
    leave(args.folder / f"seen.{launch}.{rank}", json.dumps(start))
    made = []
    for step in range(start + 1, args.steps + 1):
        if scr.need_checkpoint():
            made.append([step, save(step, rank, args)])
            leave(args.folder / f"done.{rank}", str(step))
        if scr.should_exit():
            break
    leave(args.folder / f"result.{launch}.{rank}", json.dumps({"seen": seen, "made": made}))
    if args.stay:
        signal.pause()
    scr.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
