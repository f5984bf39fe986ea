"""A training script that is told to leave. It prints `middle` in a step and goes on when `go` is beside its run.

Usage: leaver.py DIRECTORY JSON     options: at (step that stops in its middle), how (what it does there), workers,
                                    handler (what the script itself does on SIGTERM), and those of the Checkpointer
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import stepwell
from tests.training.loop.small import Numbers


def _handler(kind: str, where: Path) -> None:
    def note(number: int, frame: Any) -> None:
        (where.parent / "handled").write_text(signal.Signals(number).name)
        if kind == "exits":
            raise SystemExit(9)

    if kind == "faulthandler":
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    elif kind:
        signal.signal(signal.SIGTERM, note)


def _end_a_child() -> None:
    """A forked child, busy in C, is told to leave: it can be ended, and that is its own affair."""
    context = multiprocessing.get_context("fork")
    is_up = context.Event()
    child = context.Process(target=lambda: (is_up.set(), hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)))
    child.start()
    is_up.wait(30)
    for number in (signal.SIGINT, signal.SIGTERM):
        assert child.pid is not None
        os.kill(child.pid, number)
    child.join(30)
    print("child", child.exitcode, flush=True)


def main() -> None:
    os.setsid()
    where, wishes = Path(sys.argv[1]), json.loads(sys.argv[2])
    at, how = wishes.pop("at", 5), wishes.pop("how", "wait")
    _handler(wishes.pop("handler", ""), where)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    workers = wishes.pop("workers", 0)
    loader = DataLoader(Numbers(400), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    options = {"policy": stepwell.Never(), "seed": 7, **wishes}
    ckpt = stepwell.Checkpointer(where, model=model, optimizer=optimizer, data=loader, **options)
    print("restored", ckpt.restore(), ckpt.status().step, flush=True)
    for _ in ckpt.epochs(1):
        for batch in ckpt.data:
            step = ckpt.status().step + 1
            print("batch", step, [int(value) for value in batch[:, 0]], flush=True)
            model(batch / 400).pow(2).mean().backward()
            if step == at:
                print("middle", step, flush=True)
                if how == "child":
                    _end_a_child()
                while not (where.parent / "go").exists():
                    time.sleep(0.005)
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                ckpt.save().wait()
    print("done", flush=True)


if __name__ == "__main__":
    main()
