"""Starts the ranks of torch groups: a process that imports torch once, and forks them when it is told to.

Requests and answers are JSON lines on stdin and stdout. Ranks are reaped only by `end`, so until then their pids are
theirs, and a signal cannot hit a stranger.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.groups.scenes import play


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"start": start, "signal": send_signal, "end": end}[request.pop("do")](**request)
        print(json.dumps(answer), flush=True)


def start(store: str, scene: str, size: int, folder: str) -> list[int]:
    """Fork the ranks; they find each other through rank 0's TCP store, or through a file."""
    listener = socket.create_server(("127.0.0.1", 0))
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                be_rank(store, scene, rank, size, Path(folder), listener)
            finally:
                os._exit(1)
        pids.append(pid)
    listener.close()
    return pids


def be_rank(store: str, scene: str, rank: int, size: int, folder: Path, listener: socket.socket) -> None:
    sys.stdin.close()
    sys.stdout = sys.stderr
    shared: Any
    if store == "tcp":
        port = listener.getsockname()[1]
        fd = listener.detach()
        seconds = timedelta(seconds=20)
        if rank == 0:
            shared = dist.TCPStore("127.0.0.1", port, size, True, seconds, master_listen_fd=fd)
        else:
            os.close(fd)
            shared = dist.TCPStore("127.0.0.1", port, size, False, seconds)
    else:
        shared = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
    play(scene, folder)
    signal.pause()  # rank 0 holds the store: it stays until everybody has a result


def send_signal(pid: int, number: int) -> None:
    os.kill(pid, number)


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
