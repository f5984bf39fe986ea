"""The training run of the tests with many ranks: DDP on gloo, with everything in it that a wrong resume would spoil.

    trainer.py WHERE [options]      beside WHERE: `ledger`, and at the end WHERE.end.<rank> with a digest of everything

BatchNorm statistics, dropout, AdamW's moments, a schedule, samples that draw from all three generators. Each rank has
generators of its own. `--stand-in` trains with the simplest checkpoints that can work (stand_in.py) instead of
stepwell, `--plain` with none: so the harness can be proved, and its controls have something to break.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks import hooks, ledger, stand_in

FEATURES, CLASSES = 8, 4


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("where")
    add("--samples", type=int, default=96)
    add("--batch", type=int, default=4, help="of one rank")
    add("--epochs", type=int, default=3)
    add("--loader", default="sampler", help="`sampler`: torch's with a DistributedSampler; else ours with that tail")
    add("--keyed", action="store_true")
    add("--workers", type=int, default=0)
    add("--accumulate", type=int, default=1)
    add("--width", type=int, default=32)
    add("--every", type=int, default=3, help="steps from checkpoint to checkpoint")
    add("--seconds", type=float, help="seconds from checkpoint to checkpoint, instead")
    add("--auto", action="store_true", help="the automatic frequency, instead")
    add("--keep", type=int, default=2)
    add("--protect", help="checkpoints go to the cache of the node that RANKS_NODE names first; as Xor(4), say")
    add("--tls", help="with --protect: a folder with certificates")
    add("--flush", type=int, default=4, help="with --protect: each so many go on to the shared place")
    add("--draw-seed", action="store_true", help="no seed is given: the first start draws one for all ranks")
    add("--sleep", type=float, default=0.0, help="seconds, the length of a step")
    add("--slow", default="0:1", help="RANK:FACTOR, a rank that sleeps longer")
    add("--stop", action="append", default=[], help="STEP:PATH, wait in this step until the file exists")
    add("--hold", help="PATH, all ranks wait before the last epoch until the file exists")
    add("--touch", help="STEP:RANK, write into all parameters and moments in this step, before the optimizer does")
    add("--refuse", help="STEP:RANK, an object refuses to tell its state after this step")
    add("--rebuild", action="store_true", help="DDP lays its buckets out anew after the first step")
    add("--plain", action="store_true")
    add("--stand-in", action="store_true")
    add("--forget", default="", help="what the stand-in does not bring back")
    return parser.parse_args()


class Numbers(Dataset[torch.Tensor]):
    """Each sample carries its index, features that are blurred each time, and its class."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._features = torch.randn(length, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = 0.1 * torch.randn(FEATURES) + 0.1 * float(numpy.random.rand()) + 0.1 * random.random()
        wanted = self._features[index, :CLASSES].argmax().float()
        return torch.cat([torch.tensor([float(index)]), self._features[index] + noise, wanted.reshape(1)])


class Refuses:
    """A tracked object that does not tell its state when it is asked after one step."""

    def __init__(self, when: str | None, rank: int) -> None:
        step, _, who = (when or "0:-1").partition(":")
        self._step = int(step) if int(who) == rank else 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        if self._step and self.step == self._step:
            raise RuntimeError("this object refuses to tell its state")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def make_loader(args: argparse.Namespace) -> Any:
    """The one the user would write."""
    data = Numbers(args.samples)
    if args.loader == "sampler":
        return DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data), num_workers=args.workers)
    import stepwell

    more = {"keyed": True} if args.keyed else {}
    return stepwell.DataLoader(
        data, args.batch, shuffle=True, tail=args.loader, num_workers=args.workers, **more
    )  # rank and world size are those of the group


def make_checkpointer(args: argparse.Namespace, loader: Any, tracked: dict[str, Any]) -> Any:
    if args.plain or args.stand_in:
        every = 0 if args.plain else args.every
        return stand_in.Checkpointer(args.where, loader, every, set(args.forget.split(",")), tracked)
    import stepwell
    import stepwell.levels.level_spec

    seed = None if args.draw_seed else 7
    policy: Any = stepwell.Every(steps=args.every)
    if args.seconds is not None:
        policy = stepwell.Every(seconds=args.seconds)
    if args.auto:
        policy = stepwell.Auto()
    levels: Any = None
    if args.protect is not None:
        cache = Path(args.where).parent / f"node.{os.environ['RANKS_NODE']}"
        protect = eval(args.protect, vars(stepwell.levels.level_spec))  # of a test's own command line
        levels = [stepwell.Node(cache, protect=protect, tls=args.tls), stepwell.Shared(every=args.flush)]
    return stepwell.Checkpointer(
        args.where, policy=policy, keep=args.keep, levels=levels, data=loader, seed=seed, grace=None, **tracked
    )


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, by name."""
    found = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{number}/{name}": value for name, value in state.items()}
    return found


def checksum(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for tensor in tensors_of(model, optimizer).values():
        total = zlib.crc32(tensor.contiguous().numpy().tobytes(), total)
    return total


def ending(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> dict[str, Any]:
    """Digests of all there is at the end, and how many bytes one copy of the state has."""
    buffers = {f"buffers/{name}": value for name, value in model.named_buffers()}
    state = tensors_of(model, optimizer) | buffers
    found: dict[str, Any] = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state.items()}
    generators = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr(numpy.random.get_state()).encode(),
        "python": repr(random.getstate()).encode(),
    }
    found |= {f"generators/{name}": hashlib.sha256(value).hexdigest() for name, value in generators.items()}
    nbytes = sum(value.numel() * value.element_size() for value in state.values())
    return found | {"step": step, "scheduler": scheduler.state_dict(), "nbytes": nbytes}


def stand_still(args: argparse.Namespace, step: int, rank: int) -> None:
    """Wait where the test wants this rank to."""
    for when, _, path in (item.partition(":") for item in args.stop):
        if int(when) == step and not os.path.exists(path):
            Path(f"{path}.{os.environ['RANKS_LAUNCH']}.{rank}").touch()
            while not os.path.exists(path):
                time.sleep(0.005)


def hold(path: str) -> None:
    """Wait until the file exists, in a collective: a rank that dies meanwhile ends the others, as in a step."""
    if dist.get_rank() == 0:
        Path(f"{path}.{os.environ['RANKS_LAUNCH']}").touch()
    is_over = torch.zeros(1)
    while not is_over:
        is_over[0] = os.path.exists(path)
        dist.broadcast(is_over, 0)
        time.sleep(0.005)


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # so that a kill takes the workers too, as the end of a container does
    args = options()
    where = Path(args.where)
    os.environ.setdefault("RANKS_LAUNCH", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    hooks.install(where.parent)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, args.width),
        torch.nn.BatchNorm1d(args.width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(args.width, args.width),
        torch.nn.ReLU(),
        torch.nn.Linear(args.width, CLASSES),
    )
    # Without `find_unused_parameters` DDP lays its buckets out anew after the first step, which changes the order of
    # sums: the first step after a restart would differ in the last bits from the same step of the uninterrupted run.
    model = DistributedDataParallel(network, find_unused_parameters=not args.rebuild)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    torch.manual_seed(100 + rank)
    numpy.random.seed(200 + rank)
    random.seed(300 + rank)
    refuses = Refuses(args.refuse, rank)
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "refuses": refuses}
    ckpt = make_checkpointer(args, make_loader(args), tracked)
    ckpt.restore()
    book = ledger.Writer(str(where.parent / "ledger"))
    status = ckpt.status()
    book.note(resumed=status.step, lineage=status.lineage, weights=checksum(model, optimizer))
    train(args, ckpt, book, model, optimizer, scheduler, refuses)
    digest = ending(model, optimizer, scheduler, refuses.step)
    final = Path(f"{args.where}.end.{rank}")
    Path(f"{final}.new").write_text(json.dumps(digest))
    os.rename(f"{final}.new", final)
    dist.destroy_process_group()


def train(
    args: argparse.Namespace,
    ckpt: Any,
    book: ledger.Writer,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    refuses: Refuses,
) -> None:
    rank, used, done = dist.get_rank(), [], 0
    slow_rank, factor = args.slow.split(":")
    seconds = args.sleep * (float(factor) if int(slow_rank) == rank else 1.0)
    touch_step, _, touch_rank = (args.touch or "0:-1").partition(":")
    for epoch in ckpt.epochs(args.epochs):
        if args.hold is not None and epoch == args.epochs - 1:
            hold(args.hold)
        for batch in ckpt.data:
            used.append(ledger.of_batch(epoch, batch))
            is_last = len(used) == args.accumulate
            with contextlib.nullcontext() if is_last else model.no_sync():
                guess = model(batch[:, 1:-1])
                (torch.nn.functional.cross_entropy(guess, batch[:, -1].long()) / args.accumulate).backward()
            if not is_last:
                continue
            if refuses.step + 1 == int(touch_step) and rank == int(touch_rank):
                with torch.no_grad():
                    moments = [item for state in optimizer.state.values() for item in state.values() if item.dim()]
                    for tensor in (*model.parameters(), *moments):  # a rank may store only these or only those
                        tensor.add_(0.0)  # the same bits, but a change all the same
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            refuses.step += 1
            book.note(step=refuses.step, used=used, weights=checksum(model, optimizer))
            used = []
            done += 1
            hooks.settle(ckpt, done)
            if seconds:
                time.sleep(seconds)  # the length of a step, as a larger model would have it
            stand_still(args, refuses.step, rank)


if __name__ == "__main__":
    main()
