"""How fast a run comes back: from the arena of an agent that outlived its trainer, and cold from disk.

    python benchmarks/restore.py [--gb 9.35] [--device cuda] [--tensors 1170] [--where DIRECTORY] [--repeat 1] [--sweep]

A process makes a model and its AdamW state of the given size, saves it and kills itself. A second one restores from the
arena, a third from disk, with the page cache dropped (as root). Each measures the limit beside it: the host-to-device
copy from page-locked memory, or on a CPU the parallel copy in memory, and the direct read of the same file by 1 to 16
threads, best of all. Prints phases, limits and the share reached. --sweep reads the same bytes from memory and from
disk by 1 to 16 threads, with and without huge pages in the staging: the constants of `restore/verified_read` and
`restore/into_tensors`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import stepwell
import stepwell.restore.from_memory
import stepwell.restore.load
import stepwell.restore.open_run
import stepwell.restore.search
from stepwell.events.journal import read_events
from stepwell.restore import into_tensors
from stepwell.restore.byte_sources import FileSource, MemorySource
from stepwell.restore.load import load
from stepwell.restore.whole import Part
from stepwell.storage.format.record import Record
from stepwell.training.state.tracked import track

BLOCK_BYTES = 4 << 20


def build(arguments: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Linear layers: each has 2 parameters, and AdamW keeps 2 moments and a step for each parameter."""
    layers = max(1, arguments.tensors // 8)
    width = max(8, int((arguments.gb * 1e9 / 12 / layers) ** 0.5) // 8 * 8)
    with torch.device(arguments.device):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), fused=arguments.device == "cuda")


def save(arguments: argparse.Namespace) -> None:
    """Save one step and die without a word, so that the agent lingers with the arena."""
    model, optimizer = build(arguments)
    ckpt = stepwell.Checkpointer(arguments.where, policy=stepwell.Never(), model=model, optimizer=optimizer)
    ckpt.restore()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ckpt.step()
    ckpt.save().wait(300)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def timed(spent: dict[str, float], owner: Any, name: str, label: str) -> Iterator[None]:
    """Add up what calls of `owner.name` take."""
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return real(*given, **named)
        finally:
            spent[label] = spent.get(label, 0.0) + time.perf_counter() - started

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


PHASES = (
    (stepwell.restore.from_memory, "find_orphan", "ask agent"),
    (stepwell.restore.open_run.catalog, "scan", "scan directory"),
    (stepwell.restore.open_run.catalog, "read_record", "read record"),
    (stepwell.restore.from_memory.Record, "load", "parse record (arena)"),
    (stepwell.restore.load, "Fit", "compare with live"),
    (stepwell.restore.load.Fit, "targets", "fresh tensors"),
    (stepwell.restore.load, "read_record_leaves", "read, verify, place"),
    (stepwell.restore.load, "Placing", "prepare placing"),
    (stepwell.restore.load, "unflatten", "build state"),
    (stepwell.restore.load, "_give", "load_state_dict"),
    (stepwell.restore.open_run, "create_next", "new lineage"),
    (stepwell.restore.search, "load", "= load in all"),
    (stepwell.restore.search.Search, "_try", "= load and events"),
)


def restore(arguments: argparse.Namespace) -> None:
    """Restore in a process that has its model and a fresh optimizer, as a restarted trainer has."""
    model, optimizer = build(arguments)
    wait(arguments)
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for owner, name, label in PHASES:
            if hasattr(owner, name):
                stack.enter_context(timed(spent, owner, name, label))
        ckpt = stepwell.Checkpointer(arguments.where, policy=stepwell.Never(), model=model, optimizer=optimizer)
        stack.enter_context(timed(spent, ckpt, "_open", "after: agent, arena"))
        started = time.perf_counter()
        assert ckpt.restore()
        wait(arguments)
        seconds = time.perf_counter() - started
    event = [event for event in read_events(Path(arguments.where) / "events.jsonl") if event["kind"] == "restore"][-1]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert all(int(torch.count_nonzero(tensor)) for tensor in moments[:9]), "nothing came back"
    ckpt.close(save=False)
    del ckpt
    limit = (
        {"host limit": host_limit(arguments)} if event["source"] == "memory" else {"disk limit": disk_limit(arguments)}
    )
    print(json.dumps({"seconds": seconds, "phases": spent, "event": event, "limits": limit}))


def host_limit(arguments: argparse.Namespace) -> float:
    """Bytes per second that memory can be copied at: to the device from page-locked memory, or by all cores."""
    nbytes = 256 << 20
    if arguments.device == "cuda":
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(16):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 16 * nbytes / (time.perf_counter() - started)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    cores = len(os.sched_getaffinity(0))
    part = nbytes // cores

    def move(number: int) -> None:
        for _ in range(8):
            ctypes.memmove(target.data_ptr() + number * part, source.data_ptr() + number * part, part)

    return max(8 * part * cores / in_threads(cores, move) for _ in range(3))


def disk_limit(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes per second of plain direct reads of the shard, cold, by number of threads. At most 4 GB for each."""
    (shard,) = Path(arguments.where).glob("step-*/rank-00000.safetensors")
    found = {}
    for threads in (1, 2, 4, 8, 16):
        drop_caches()
        count = min(shard.stat().st_size // BLOCK_BYTES, 1024 if threads > 2 else 256)
        fd = os.open(shard, os.O_RDONLY | os.O_DIRECT)
        found[str(threads)] = count * BLOCK_BYTES / in_threads(threads, reader(fd, count))
        os.close(fd)
    return found


def reader(fd: int, count: int) -> Callable[[int], None]:
    """Work of a thread that takes its share of the first `count` blocks."""
    numbers, lock = iter(range(count)), threading.Lock()

    def read(_: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as view:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                os.preadv(fd, [view], number * BLOCK_BYTES)

    return read


def sweep(arguments: argparse.Namespace) -> None:
    """Seconds of `load` by number of threads, from a memfd and from the file, each into a fresh optimizer."""
    (shard,) = Path(arguments.where).glob("step-*/rank-00000.safetensors")
    record = Record.load((shard.parent / "rank-00000.json").read_bytes(), path=str(shard))
    fd, nbytes = os.memfd_create("sweep"), shard.stat().st_size
    with shard.open("rb") as file:
        while os.sendfile(fd, file.fileno(), None, 1 << 30):
            pass
    found: dict[str, dict[str, float]] = {}

    def measure(label: str, threads: int, kind: type, *given: Any) -> None:
        model, optimizer = build(arguments)
        source = type("Threaded", (kind,), {"threads": threads})
        drop_caches()
        wait(arguments)
        started = time.perf_counter()
        part = Part(record, lambda _: source(*given))
        load([part], track({"model": model, "optimizer": optimizer}), only=None, strict=True)
        wait(arguments)
        found.setdefault(label, {})[str(threads)] = time.perf_counter() - started

    measure("warm-up", 8, MemorySource, fd, 0, nbytes, "sweep")
    for threads in (4, 8, 12, 16) if nbytes > 4e9 else (1, 2, 4, 8, 16):
        if arguments.device == "cuda":
            into_tensors.HUGE_PAGES = False
            measure("memory, small pages", threads, MemorySource, fd, 0, nbytes, "sweep")
            into_tensors.HUGE_PAGES = True
        measure("memory", threads, MemorySource, fd, 0, nbytes, "sweep")
        measure("disk", threads, FileSource, shard)
    print(json.dumps({"nbytes": nbytes, **found}))


def wait(arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def in_threads(count: int, work: Callable[[int], None]) -> float:
    """Seconds until all of them are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def drop_caches() -> None:
    """Cold, where we may: direct reads do not fill the page cache, but something else may have."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def run(role: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One role in a process of its own."""
    given = [f"--{name}={getattr(arguments, name)}" for name in ("gb", "device", "tensors", "where")]
    command = [sys.executable, __file__, f"--role={role}", *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "STEPWELL_LINGER": "120"})
    if done.returncode != (-signal.SIGKILL if role == "save" else 0):
        raise SystemExit(f"{role} failed: {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return found


def show(title: str, found: dict[str, Any]) -> None:
    """One restore: its phases, and how far from the limit."""
    event = found["event"]
    nbytes, source = event["nbytes"], event["source"]
    rates = found["limits"].get("host limit") or max(found["limits"]["disk limit"].values())
    print(f"\n{title}: {nbytes / 1e9:.2f} GB from {source}")
    for label, seconds in found["phases"].items():
        print(f"  {label:24s} {seconds * 1e3:9.1f} ms")
    for label, seconds in (("the event's seconds", event["seconds"]), ("restore() in all", found["seconds"])):
        rate = nbytes / seconds
        print(f"  {label:24s} {seconds * 1e3:9.1f} ms  {rate / 1e9:6.2f} GB/s = {100 * rate / rates:.0f} % of limit")
    limits = found["limits"].get("disk limit")
    by_threads = "  ".join(f"{name} threads {rate / 1e9:.2f}" for name, rate in limits.items()) if limits else ""
    print(f"  limit {rates / 1e9:.2f} GB/s ({nbytes / rates * 1e3:.0f} ms)  {by_threads}")


def show_sweep(found: dict[str, Any]) -> None:
    nbytes = found.pop("nbytes")
    for label, measured in found.items():
        rates = (f"{threads}: {nbytes / seconds / 1e9:.2f}" for threads, seconds in measured.items())
        print(f"load, GB/s by threads   {label:22s} {'  '.join(rates)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tensors", type=int, default=1170)
    parser.add_argument("--where")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--role", choices=["save", "restore", "sweep"])
    arguments = parser.parse_args()
    if arguments.role is not None:
        return {"save": save, "restore": restore, "sweep": sweep}[arguments.role](arguments)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name() if arguments.device == 'cuda' else 'no device'}"
    )
    root = arguments.where or tempfile.mkdtemp(prefix="stepwell-restore-", dir=".")
    try:
        for number in range(arguments.repeat):
            arguments.where = os.path.join(root, f"run{number}")
            run("save", arguments)
            show("arena", run("restore", arguments))
            drop_caches()
            show("disk, cold", run("restore", arguments))
            if arguments.sweep:
                show_sweep(run("sweep", arguments))
            shutil.rmtree(arguments.where)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return None


if __name__ == "__main__":
    main()
