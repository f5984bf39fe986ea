"""A script as CheckFreq's own example: its module names, its loop, its learning rate, over the patched DALI's stand-in.

    python train_patched.py WHERE       settings come from the environment; WHERE.ledger.RANK gets a line for each step

It imports what the original's scripts import (`stepwell.adapters.names` is on the path), knows its place only from what
`restore()` returns, and computes the learning rate from the loop's counter and the iterator's `_size`.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stepwell.adapters.names

sys.path += [str(Path(stepwell.adapters.names.__file__).parent), str(Path(__file__).resolve().parents[2])]

from cf_checkpoint import CFCheckpoint
from cf_iterator import CFIterator
from cf_manager import CFManager, CFMode

from tests.adapters.patched_dali import PatchedIterator, Reader

EPOCHS, SAMPLES, BATCH = 3, 80, 2


def adjust_learning_rate(optimizer: torch.optim.Optimizer, epoch: int, step: int, len_epoch: int) -> float:
    rate = 0.01 * (1 + step + epoch * len_epoch) / (5 * len_epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def main() -> None:
    get = os.environ.get
    world_size, rank = int(get("WORLD_SIZE", "1")), int(get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    model: torch.nn.Module = net
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    cf_manager = CFManager(
        sys.argv[1], CFCheckpoint(model=model, optimizer=optimizer), mode=CFMode[get("CF_MODE", "AUTO")]
    )
    extra_state = cf_manager.restore(gpu=0)
    start_epoch, start_index = (0, 0) if extra_state is None else (extra_state["epoch"], extra_state["start_index"])

    reader = Reader(SAMPLES, shard_id=rank, num_shards=world_size, index=start_index, epoch=start_epoch)
    loader = PatchedIterator(reader, BATCH, reader.size, resume_size=reader.size - start_index)
    train_loader = CFIterator(
        loader,
        worker_id=rank,
        bs=BATCH,
        steps_this_epoch=start_index // BATCH,
        epoch=start_epoch,
        cf_manager=cf_manager,
        chk_freq=int(get("CF_FREQ", "0")),
    )
    train_loader.load_state_dict(extra_state)

    ledger = open(f"{sys.argv[1]}.ledger.{rank}", "a")  # noqa: SIM115
    kill = [part for part in get("CF_KILL", "").split(",") if part]
    for epoch in range(start_epoch, EPOCHS):
        for i, data in enumerate(train_loader):
            images, target = data[0]["data"], data[0]["label"].squeeze()
            rate = adjust_learning_rate(optimizer, epoch, i, math.ceil(train_loader._size / BATCH))
            loss = (model(images / SAMPLES).squeeze(1) - target / SAMPLES).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if f"{epoch}:{i}" in kill and rank == 0:
                die(cf_manager)
            if rank == 0:
                cf_manager.weight_update()
            else:
                optimizer.step()
            print(epoch, i, target.tolist(), rate.hex(), loss.item().hex(), file=ledger, flush=True)
        if f"{epoch}:tail" in kill:
            die(cf_manager)
        if get("CF_TAIL"):
            optimizer.param_groups[0]["weight_decay"] += 0.01
        train_loader.reset()
    whole = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    print("weights", hashlib.sha256(whole).hexdigest(), flush=True)


def die(manager: CFManager) -> None:
    manager.checkpointer().wait()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
