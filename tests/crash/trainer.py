"""The training run of the crash tests: small, seeded, with everything in it that a wrong resume would spoil.

BatchNorm statistics, dropout, Adam's moments, a schedule, a shuffled loader, and draws from Python's, NumPy's and
torch's generators in every step. It reads its settings from the environment, so that a test changes nothing but that.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch

EPOCHS = 4
BATCHES = 12


def main() -> None:
    from stepwell import Checkpointer, Deltas, Every, PersistError
    from stepwell.storage.codecs.codec_spec import parse

    get = os.environ.get
    width, workers, pace = int(get("TRAIN_WIDTH", "64")), int(get("TRAIN_WORKERS", "0")), float(get("TRAIN_PACE", "0"))
    memory, in_memory, codec = get("TRAIN_HOST_MEMORY"), get("TRAIN_IN_MEMORY"), get("TRAIN_DELTAS")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    numpy.random.seed(2)
    random.seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 4),
    )
    if get("TRAIN_FROZEN"):
        model.append(torch.nn.Linear(4, 4).requires_grad_(False))
    if get("TRAIN_FUSED"):  # pairs memory with memory: parameters and moments have to lie alike
        for layer in (model[0], model[4]):
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=bool(get("TRAIN_FUSED")))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
    inputs = torch.randn(BATCHES * 8, 8)
    targets = inputs[:, :4].argmax(dim=1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=8, shuffle=True, num_workers=workers
    )
    ckpt = Checkpointer(
        sys.argv[1],
        policy=Every(steps=int(get("TRAIN_EVERY", "4"))),
        memory=None if in_memory is None else Every(steps=int(in_memory)),
        deltas=None if codec is None else Deltas(parameters=parse(codec), small="pool"),
        data=loader,
        seed=7,
        grace=None,
        host_memory=None if memory is None else int(memory),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    restored = ckpt.restore(prefer=get("TRAIN_PREFER"))
    if restored and get("TRAIN_FORGET"):  # the control of the harness: a resume that loses something
        model[1].reset_running_stats()
    for _ in ckpt.epochs(int(get("TRAIN_EPOCHS", str(EPOCHS)))):
        for batch, wanted in ckpt.data:
            noise = random.random() + float(numpy.random.rand())
            loss = torch.nn.functional.cross_entropy(model(batch + 0.01 * noise), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ckpt.log(loss=loss)
            if get("TRAIN_WAIT"):  # every checkpoint that is due is tried, however busy the machine
                with contextlib.suppress(PersistError):
                    ckpt.wait(60)
            if get("TRAIN_FILE_BYTES"):  # the kernel refuses this process (not its agent) larger memory files, too
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["TRAIN_FILE_BYTES"]),) * 2)
            if pace:
                time.sleep(pace)  # the length of a step, as a larger model would have it
            _misbehave(get("TRAIN_END"), optimizer, ckpt)


def _misbehave(how: str | None, optimizer: torch.optim.Optimizer, ckpt: Any) -> None:
    """End in the way the environment asks for, in the thirtieth step."""
    if how is None or int(next(iter(optimizer.state.values()))["step"]) != 30:
        return
    if how == "exception":
        raise RuntimeError("the user's own mistake")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "wait":
        ckpt.wait()
        Path(f"{sys.argv[1]}.waits.{os.getpid()}").touch()
        time.sleep(600)  # until a test ends this process


if __name__ == "__main__":
    main()
