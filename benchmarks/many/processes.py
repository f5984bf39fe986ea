"""Few ranks as they really are: processes with gloo. What it costs them to meet, to agree and to open the line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path += [str(HERE), str(HERE.parent / "src")]

from many.report import Row  # noqa: E402

ABOUT = __doc__
RANKS = (2, 8, 32)
COLUMNS = ("group open ms", "20 all_gathers ms", "one all_gather ms", "line open ms", "line close ms", "tries")
FIT = ()
_KEY = b"k" * 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tries", type=int, default=5)


def measure(size: int, options: argparse.Namespace) -> Row:
    """One row: medians of the slowest rank of each try."""
    tries = [_try(size) for _ in range(options.tries)]
    row: Row = {name: statistics.median(found[name] for found in tries) for name in tries[0]}
    return {**row, "one all_gather ms": row["20 all_gathers ms"] / 20, "tries": len(tries)}


def _try(size: int) -> dict[str, float]:
    """In a process of its own, which imports torch once and forks the ranks."""
    done = subprocess.run(
        [sys.executable, __file__, str(size)], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(size: int) -> dict[str, float]:
    import socket

    import torch
    import torch.distributed as dist  # noqa: F401

    import stepwell.ranks.groups.torch_group
    import stepwell.ranks.line.line  # noqa: F401

    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    reading, writing = os.pipe()
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                os.write(writing, (json.dumps(_be_rank(rank, size, listener)) + "\n").encode())
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    listener.close()
    os.close(writing)
    with open(reading) as stream:
        lines = [json.loads(line) for line in stream]
    for pid in pids:
        os.waitpid(pid, 0)
    if len(lines) != size:
        raise RuntimeError(f"{size - len(lines)} of {size} ranks failed")
    return {name: max(line[name] for line in lines) for name in lines[0]}


def _be_rank(rank: int, size: int, listener: Any) -> dict[str, float]:
    from datetime import timedelta

    import torch.distributed as dist

    from stepwell.ranks.groups.detect import choose_group
    from stepwell.ranks.line.line import Line

    port, fd, seconds = listener.getsockname()[1], listener.detach(), timedelta(seconds=120)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, size, True, seconds, master_listen_fd=fd)
    else:
        os.close(fd)
        store = dist.TCPStore("127.0.0.1", port, size, False, seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    found: dict[str, float] = {}
    group = choose_group()
    began = time.perf_counter()
    group.open(60)
    found["group open ms"] = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    for number in range(20):
        group.all_gather([number, rank], "a round", 60)
    found["20 all_gathers ms"] = 1e3 * (time.perf_counter() - began)
    line = Line(group, _KEY, lambda rank, message: None, lambda rank: None)
    began = time.perf_counter()
    line.open(60)
    found["line open ms"] = 1e3 * (time.perf_counter() - began)
    dist.barrier()
    began = time.perf_counter()
    line.close()
    found["line close ms"] = 1e3 * (time.perf_counter() - began)
    group.close()
    return found


if __name__ == "__main__":
    print(json.dumps(_run(int(sys.argv[1]))))
