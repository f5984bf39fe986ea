"""Many ranks in a few processes: each rank is a thread with a real group over a real TCP store on loopback.

Owns:    the processes (forked, so that torch is imported once), the store (a process of its own), who is on which node.
Not:     what the ranks do: a part gives a function for each process, and gets back what it returned.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from stepwell.ranks.groups import group as group_module
from stepwell.ranks.groups import torch_group

STACK_BYTES = 256 << 10
_PR_SET_PDEATHSIG = 1
SWITCH_SECONDS = 0.2
"""Each thread that waits for the interpreter wakes up that often: hundreds of them would do nothing else every 5 ms."""
STORE_SECONDS = 600.0
MOST_GUARDED = 4096
"""Ranks. Beyond, requests are made without the thread that lets a rank give up on a store that hangs: the kernel has
numbers for 32,768 threads, and a rank of the line has two already.
"""
_fork = multiprocessing.get_context("fork")


class Counted:
    """A connection to the store that counts its requests; one for many keys counts as one for each."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def request(*arguments: Any) -> Any:
            self.requests[name] += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return call(*arguments)

        return request


@dataclass
class Process:
    """One of the processes, as a part sees it: its ranks, and a barrier of all processes."""

    ranks: range
    size: int
    node_size: int
    port: int
    barrier: Any
    groups: list[Any] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of this process, in the last `all_do`: what a busy machine does not change."""
    spent: threading.local = field(default_factory=threading.local)
    """`seconds` of a rank's thread: CPU of its requests to the store, each of which has a thread of its own."""

    def all_do(self, call: Callable[[Any], Any]) -> float:
        """`call` with each group at the same time, on all processes; seconds until all here are done."""
        self.barrier.wait(STORE_SECONDS)
        began, before = time.monotonic(), time.process_time()
        list(self._pool.map(call, self.groups))
        seconds, self.cpu_seconds = time.monotonic() - began, time.process_time() - before
        return seconds

    def enter(self) -> None:
        """Make the groups; each connects with its first exchange."""
        threading.stack_size(STACK_BYTES)
        sys.setswitchinterval(SWITCH_SECONDS)
        raise_limit()
        self._pool = ThreadPoolExecutor(len(self.ranks))
        one = dist.TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=STORE_SECONDS))
        local = threading.local()
        torch_group._connect = lambda: Counted(one.clone())  # type: ignore[assignment]
        group_module._node_name = lambda: local.node
        guarded = torch_group._within if self.size <= MOST_GUARDED else lambda seconds, call: call()

        def within(seconds: float, call: Callable[[], Any]) -> Any:
            spent = getattr(self.spent, "seconds", [])

            def timed() -> Any:
                began = time.thread_time()
                try:
                    return call()
                finally:
                    spent.append(time.thread_time() - began)

            return guarded(seconds, timed)

        torch_group._within = within
        for rank in self.ranks:
            torch_group.dist = SimpleNamespace(  # type: ignore[assignment]
                get_rank=lambda rank=rank: rank, get_world_size=lambda: self.size, get_backend=lambda: "none"
            )
            group = torch_group.DistributedGroup()
            honest = group.open

            def open_named(seconds: float, group: Any = group, honest: Any = honest) -> None:
                local.node = f"node-{group.rank // self.node_size:05d}"
                honest(seconds)

            group.open = open_named  # type: ignore[method-assign]
            self.groups.append(group)

    def share_tables(self) -> None:
        """What every rank knows of all others is one object here: the memory of a thousand ranks is not that of one."""
        for name in ("node_of", "hosts"):
            for group in self.groups:
                if hasattr(group, name):
                    setattr(group, name, getattr(self.groups[0], name))


def play(size: int, processes: int, node_size: int, part: Callable[[Process], Any]) -> tuple[list[Any], float]:
    """What `part` returned in each process, in order of ranks, and CPU seconds of the store.

    Raises RuntimeError if a process failed.
    """
    processes = min(processes, size)
    raise_limit()
    store, port = _start_store()
    barrier = _fork.Barrier(processes)
    each = -(-size // processes)
    children, pipes = [], []
    try:
        for number in range(processes):
            ranks = range(number * each, min(size, (number + 1) * each))
            near, far = _fork.Pipe()
            child = _fork.Process(target=_run, args=(Process(ranks, size, node_size, port, barrier), part, far))
            child.start()
            far.close()
            children.append(child)
            pipes.append(near)
        results = []
        for pipe in pipes:
            if not pipe.poll(STORE_SECONDS):
                raise RuntimeError(f"no result within {STORE_SECONDS:g} s")
            results.append(pipe.recv())
        if failed := [result for result in results if isinstance(result, Exception)]:
            raise RuntimeError(f"{len(failed)} of {processes} processes failed: {failed[0]}")
        return results, _cpu_seconds(store)
    except EOFError:
        raise RuntimeError("a process ended without a result") from None
    finally:
        for child in children:
            child.kill()
            child.join(10)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


def raise_limit() -> int:
    """As many descriptors as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def descriptors() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd")) - 1


def _end_with_parent() -> None:
    """However that ends: thousands of threads that nobody waits for would be left."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(process: Process, part: Callable[[Process], Any], pipe: Any) -> None:
    _end_with_parent()
    try:
        process.enter()
        pipe.send(part(process))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        process.barrier.abort()
    finally:
        pipe.close()
        os._exit(0)  # the way out would wait for threads


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _start_store() -> tuple[int, int]:
    near, far = _fork.Pipe()
    pid = os.fork()
    if pid == 0:
        _end_with_parent()
        try:
            server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
            far.send(server.port)
            signal.pause()
        finally:
            os._exit(1)
    port: int = near.recv()
    return pid, port
