"""A run that forks while a snapshot is being copied: `forker.py WHERE HOW`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

import torch

import stepwell
from stepwell.training.snapshot import host_copy

_may_copy = threading.Event()


def main(where: str, how: str) -> None:
    torch.set_num_threads(1)  # those of OpenMP would be missing in a child, and it would wait for them
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters())
    tracked = {"layer": layer, "optimizer": optimizer}

    def step() -> None:
        layer(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def child() -> None:
        host_copy.slow_copy = lambda: None
        for _ in range(3):
            step()
        if how == "refused":
            for call in (ckpt.step, ckpt.save, ckpt.status, ckpt.wait, lambda: ckpt.log(a=1), lambda: iter(ckpt.data)):
                try:
                    call()
                except stepwell.ConfigError as error:
                    assert "was created in process" in str(error), error
                else:
                    raise AssertionError(call)
        if how == "own":
            with stepwell.Checkpointer(where + "-own", policy=stepwell.Every(steps=1), **tracked) as own:
                own.restore()
                for _ in range(4):
                    step()
                    own.step()
            print("own run committed", own.status().committed_step)
        print("child has stepped", flush=True)

    data = torch.utils.data.DataLoader(range(8), num_workers=2 * (how == "workers"))
    with stepwell.Checkpointer(where, policy=stepwell.Every(steps=2), data=data, **tracked) as ckpt:
        ckpt.restore()
        for index, _ in enumerate(ckpt.data):
            if index == 4:  # step 4 is being copied
                assert not ckpt._snapshotter._inflight.copied.is_set()
                if how == "workers":
                    assert list(torch.utils.data.DataLoader(range(4), num_workers=2)) == [0, 1, 2, 3]
                else:
                    _fork(child, how)
                _may_copy.set()
            step()
            if index == 1:
                ckpt.save().wait(60)  # there is memory now
                host_copy.slow_copy = lambda: _may_copy.wait(60)
    print("committed", ckpt.status().committed_step)


def _fork(child: object, how: str) -> None:
    assert callable(child)
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        status = process.exitcode
    else:
        pid = os.fork()
        if not pid:
            child()
            if how == "sys.exit":
                sys.exit(0)
            if how == "error":
                raise ValueError("of the child")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print("child ended with", status, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
