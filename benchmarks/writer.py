"""How near the agent comes to the disk's own limit. No torch: a puppet trainer, a memfd, the agent as a process.

    python benchmarks/writer.py [--gb 1.2] [--saves 6] [--where DIR]

In one run, on one file system: first the limit, the best plain direct write from a memfd in another process (1 to 16
threads, writes of 1, 4 and 16 MiB, a preallocated file of the same size, until the directory is synced; nothing is
hashed), then saves by the agent, from "complete" to "durable". Saves are written as in a run: the first ones try
settings. `early`: bytes are final half a write before the verdict, so that writing begins before the snapshot is
complete. At last, the limit once more, for the disk may have changed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from stepwell.events.journal import EventLog, read_events
from stepwell.handover.client import AgentClient
from stepwell.handover.memory import Arena, ArenaShape, whole_pages
from stepwell.handover.message import Heard
from stepwell.handover.protocol import Begin, Durable, Hello, NewArena, NewLayout, OfSnapshot, Released
from stepwell.storage.format.record import LeafEntry
from stepwell.storage.format.shard import LeafSpec, lay_out
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep, SaveRequest

THREADS, MIB = (1, 2, 4, 8, 16), (1, 4, 16)
BUDGET_SECONDS = 25.0


def plain_write(fd: int, nbytes: int, where: Path, threads: int, block: int) -> float:
    """Seconds for one direct write of a memfd's bytes, from the first write until the directory is synced."""
    memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    view, starts, lock = memoryview(memory), iter(range(0, nbytes, block)), threading.Lock()
    path = where / "plain.tmp"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.posix_fallocate(out, 0, nbytes)

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            piece = view[start : start + block]
            while piece:
                done = os.pwrite(out, piece, start)
                piece, start = piece[done:], start + done

    helpers = [threading.Thread(target=work) for _ in range(threads)]
    started = time.monotonic()
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    os.fsync(out)
    folder = os.open(where, os.O_RDONLY)
    os.fsync(folder)
    seconds = time.monotonic() - started
    os.close(folder)
    os.close(out)
    path.unlink()
    view.release()
    memory.close()
    return seconds


def measure_limits(argv: list[str]) -> None:
    """In a process of its own: one line per setting. Stops when the budget is spent, the likeliest come first."""
    fd, nbytes, where, only = int(argv[0]), int(argv[1]), Path(argv[2]), argv[3]
    settings = [(threads, size) for threads in (4, 8, 16, 2, 1) for size in (4, 16, 1)]
    if only != "all":
        settings = [tuple(int(part) for part in item.split("x")) for item in only.split(",")]  # type: ignore[misc]
    started = time.monotonic()
    for threads, size in settings:
        if threads <= 4 * (os.cpu_count() or 1) and time.monotonic() - started < BUDGET_SECONDS:
            print(threads, size, plain_write(fd, nbytes, where, threads, size << 20), flush=True)


def limits(fd: int, nbytes: int, where: Path, only: str = "all") -> dict[tuple[int, int], float]:
    """Seconds by (threads, MiB)."""
    command = [sys.executable, __file__, "--limits", str(fd), str(nbytes), str(where), only]
    output = subprocess.run(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[tuple[int, int], float] = {}
    for line in output.splitlines():
        threads, size, seconds = line.split()
        key = (int(threads), int(size))
        found[key] = min(float(seconds), found.get(key, 1e9))
    return found


class Puppet:
    """As much of a trainer as the agent sees."""

    def __init__(self, root: Path, nbytes: int) -> None:
        self.paths = RunPaths(root)
        self.run, self.lineage = open_run(self.paths, seed=1), create_next(self.paths, parent=0, step=0).number
        self.layout = lay_out([LeafSpec("w", "uint8", (nbytes,))])
        self.log = EventLog(self.paths.events, who="trainer")
        self.heard = threading.Condition()
        self.messages: list[tuple[Heard, float]] = []
        """And when they were heard."""
        self.client = AgentClient(self.log)
        self.number = self.lineage << 32
        self.client.start(
            Hello(os.getpid(), self.run.id, str(root), self.lineage,
                  rank=0, world_size=1, agents="", keep=Keep(), linger=0, patience=600.0),
            self._hear,
        )  # fmt: skip
        self.arena = Arena.allocate(ArenaShape(self.next(), 1, whole_pages(self.layout.nbytes), 0))
        self.fill()
        self.client.send_arena(NewArena(**vars(self.arena.shape)), self.arena.fd)
        placed = self.layout.placements[0]
        leaf = LeafEntry("w", 0, "uint8", (nbytes,), placed.start, placed.end, "parameter", "cpu", (nbytes,), (0,))
        self.plan = self.next()
        self.client.send_layout(NewLayout(self.plan, self.layout.nbytes, 0, leaves=(asdict(leaf),), versions={}))

    def next(self) -> int:
        self.number += 1
        return self.number

    def fill(self) -> None:
        image, noise = self.arena.image(0, self.layout.nbytes), os.urandom(1 << 20)
        for start in range(0, len(image), len(noise)):
            piece = image[start : start + len(noise)]
            piece[:] = noise[: len(piece)]
        image[: len(self.layout.header)] = self.layout.header

    def _hear(self, message: Heard) -> None:
        with self.heard:
            self.messages.append((message, time.monotonic()))
            self.heard.notify_all()

    def wait(self, kind: type[OfSnapshot], sequence: int) -> float:
        def find() -> float | None:
            fitting = ((m, at) for m, at in self.messages if isinstance(m, kind))
            return next((at for m, at in fitting if m.sequence == sequence), None)

        with self.heard:
            assert self.heard.wait_for(find, 120), self.messages
            found = find()
        assert found is not None
        return found

    def save(self, step: int, lead_seconds: float = 0.0) -> tuple[float, float]:
        """One save. Returns seconds from "complete" to "durable", and from the first byte to "durable"."""
        sequence = self.next()
        self.arena.claim(0)
        request = SaveRequest(step, 0, 1.0, tree={}, epoch_end=False, finished=False, name=None, files={})
        self.client.begin(Begin(request, sequence, 0, self.arena.shape.generation, self.plan, frozen=0))
        started = time.monotonic()
        if lead_seconds:
            for part in range(1, 51):
                self.arena.set_filled(0, sequence, self.layout.nbytes * part // 50)
                time.sleep(lead_seconds / 50)
        self.arena.set_sequence(0, sequence)
        self.arena.set_verdict(0, sequence, is_good=True)
        complete = time.monotonic()
        durable = self.wait(Durable, sequence)
        self.wait(Released, sequence)
        while len([*self.paths.root.glob("step-*")]) > 2:
            time.sleep(0.01)  # an older checkpoint is being removed: in a run that is over before the next save
        return durable - complete, durable - started

    def close(self) -> None:
        self.client.close(seconds=60)
        self.arena.close()
        self.log.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.2)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    nbytes = int(arguments.gb * 1e9) // 4096 * 4096
    root = Path(tempfile.mkdtemp(prefix="stepwell-writer-", dir=arguments.where))
    try:
        show(root, nbytes, arguments.saves)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def show(root: Path, nbytes: int, saves: int) -> None:
    print(f"{nbytes / 1e9:.2f} GB, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    puppet = Puppet(root / "run", nbytes)
    where = root / "plain"
    where.mkdir()
    found = limits(puppet.arena.fd, nbytes, where)
    for threads in THREADS:
        row = [f"{nbytes / found[threads, size] / 1e9:6.2f}" if (threads, size) in found else "     -" for size in MIB]
        print(f"  plain, {threads:2d} threads   1/4/16 MiB  {'  '.join(row)} GB/s")
    best = sorted(found, key=lambda key: found[key])[:2]
    limit = found[best[0]]
    rows = []
    for step in range(1, saves + 1):
        before = cpu_seconds(puppet.client.pid)
        rows.append((f"save {step}", *puppet.save(step), cpu_seconds(puppet.client.pid) - before))
    later = statistics.median(row[1] for row in rows[saves // 2 :])
    for step in (saves + 1, saves + 2):
        before = cpu_seconds(puppet.client.pid)
        rows.append(("early", *puppet.save(step, later / 2), cpu_seconds(puppet.client.pid) - before))
    again = limits(puppet.arena.fd, nbytes, where, ",".join(f"{threads}x{size}" for threads, size in best * 2))
    puppet.close()
    final = min(limit, *again.values())
    print(f"limit  {limit:.3f} s before, {min(again.values()):.3f} s after: {nbytes / final / 1e9:.2f} GB/s")
    for name, complete, first, cpu in rows:
        share = final / complete
        print(f"  {name:8s} durable {complete:6.3f} s after the verdict, {first:6.3f} s after the first byte; "
              f"{nbytes / complete / 1e9:5.2f} GB/s, {share:4.0%} of the limit; {cpu:.2f} s CPU")  # fmt: skip
    print(f"  later saves: median {later:.3f} s, {final / later:.0%} of the limit")
    for event in read_events(puppet.paths.events):
        if event["kind"] == "storage":
            print(f"  chosen: {event['threads']} threads, {event['write_bytes'] >> 20} MiB, "
                  f"{event['bytes_per_second'] / 1e9:.2f} GB/s ({event['file_system']})")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--limits"]:
        measure_limits(sys.argv[2:])
    else:
        main()
