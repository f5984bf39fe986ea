"""How fast a chain of records comes back in a fresh process, beside what the machine could do.

    python benchmarks/lc/chain_restore.py --out DIRECTORY [--parameters 126e6] [--records 62] [--deltas "lc(bits=2)"]
        [--device cuda] [--scratch DIRECTORY | --run RUN] [--repeats 3]

The network of `live_trainer.py` with AdamW trains for as many steps as there are records to be, each awaited; moments
are held, so that records have parameters alone. Then processes that begin anew restore the newest step, cold where the
page cache may be dropped (as root). Limits are taken in the same process, afterwards: the base file read directly by
four threads, the host-to-device copy (a parallel copy in memory on a CPU), and the arithmetic of all records, which is
what one core takes for one record of a part of the parameters, times their number, by all cores. `--run` restores an
existing run, which stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from live_trainer import Network, Text
from report import rows, save, wait_while_quiet
from restore import drop_caches, host_limit, in_threads, reader, timed
from torch.nn import functional

import stepwell
import stepwell.restore.from_chain
import stepwell.restore.open_run
import stepwell.storage.chain.replay
from stepwell.storage.codecs.assignment import CodedLeaf, arrange
from stepwell.storage.codecs.codec_spec import parse
from stepwell.storage.codecs.parts import Memory, apply, code, read

LAYERS, LENGTH = 10, 64
ENTRIES = 8 << 20
PHASES = (
    (stepwell.restore.from_chain, "_read_base", "base: read, check"),
    (stepwell.storage.chain.chain_image.ChainImage, "settle", "digest: base, what is held"),
    (stepwell.storage.chain.chain_image.ChainImage, "digest", "digests: base and end, the rest"),
    (stepwell.storage.chain.replay._Batch, "add", "records: parse"),
    (stepwell.storage.chain.replay._Batch, "apply", "records: unpack, apply"),
    (stepwell.restore.from_chain, "restore", "= base, records, digests in all"),
    (stepwell.restore.from_chain, "_part", "checksums of the image"),
    (stepwell.restore.open_run, "load", "into the live objects"),
)


def build(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = max(64, round((options.parameters / 12 / LAYERS) ** 0.5 / 64) * 64)
    model = Network(width, LAYERS, LENGTH).to(options.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.device == "cuda")


def wanted(options: argparse.Namespace) -> stepwell.Deltas:
    held = {"first_moments": stepwell.Hold(), "second_moments": stepwell.Hold()}
    return stepwell.Deltas(parameters=parse(options.deltas), skip_every=0, device=options.device == "cuda", **held)


def make(options: argparse.Namespace) -> None:
    """A run with one base and records of the steps after it."""
    model, optimizer = build(options)
    loader = torch.utils.data.DataLoader(Text(LENGTH), batch_size=options.batch, shuffle=True)
    ckpt = stepwell.Checkpointer(
        options.run, model=model, optimizer=optimizer, data=loader, seed=1, policy=stepwell.Never(),
        deltas=wanted(options),
    )  # fmt: skip
    ckpt.restore()
    first = None
    for step, text in enumerate(text for _ in ckpt.epochs(1000) for text in ckpt.data):
        until = time.monotonic() + (120 if first else 2)  # the first steps have none, while there is no base
        while step and time.monotonic() < until:  # none is left out
            status = ckpt.status()
            if max(status.delta_step or 0, status.committed_step or 0) >= step:
                first = first or step
                break
            time.sleep(0.005)
        if first is not None and step - first >= options.records:
            break
        text = text.to(options.device).long()
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.stderr.isatty() or step % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {ckpt.status().delta_step}", file=sys.stderr, flush=True)
    ckpt.close(save=False)


def bring_back(options: argparse.Namespace) -> None:
    """One restore, and the limits. Prints JSON."""
    model, optimizer = build(options)
    loader = torch.utils.data.DataLoader(Text(LENGTH), batch_size=options.batch, shuffle=True)
    if options.device == "cuda":
        torch.cuda.synchronize()
    spent, watch = dict[str, float](), Watch()
    with contextlib.ExitStack() as stack:
        for owner, name, label in PHASES:
            if hasattr(owner, name):  # older commits are measured with this file too
                stack.enter_context(timed(spent, owner, name, label))
        ckpt = stepwell.Checkpointer(
            options.run, model=model, optimizer=optimizer, data=loader, policy=stepwell.Never(), deltas=wanted(options)
        )
        stack.enter_context(watch)
        cpu, started = time.process_time(), time.perf_counter()
        assert ckpt.restore(prefer="newest")
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    step = ckpt.status().step
    ckpt.close(save=False)
    nbytes = sum(p.nbytes for p in model.parameters())
    total = nbytes + sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    live = total - nbytes if options.device == "cpu" else 0  # moments are made where they are restored to
    print(json.dumps({
        "seconds": seconds, "cpu_seconds": cpu, "phases": spent, "step": step, "records": records(options),
        "parameter_bytes": nbytes, "state_bytes": total,
        "taken_bytes": watch.taken, "live_bytes": live,
        "limits": limits(options, nbytes),
    }))  # fmt: skip


class Watch:
    """The most memory that this process took while it is watched: its own, and what it has in files in memory."""

    def __init__(self) -> None:
        self.taken, self._end, self._before = 0, threading.Event(), self._held()
        self._thread = threading.Thread(target=self._look)

    @staticmethod
    def _held() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        found = 1024 * sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("/memfd:"):
                    found += 512 * os.stat(link).st_blocks
        return found

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.taken = max(self.taken, self._held() - self._before)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def records(options: argparse.Namespace) -> dict[str, int]:
    """Number and bytes of those of the newest chain."""
    newest = max((Path(options.run) / "chains").iterdir())
    from stepwell.storage.chain.chain_listing import list_records

    found = list_records(newest)
    return {"count": len(found), "nbytes": sum(item.nbytes for item in found)}


def limits(options: argparse.Namespace, nbytes: int) -> dict[str, float]:
    """Seconds that the machine needs for each of what a restore cannot leave out."""
    shard = sorted(Path(options.run).glob("step-*/rank-00000.safetensors"))[-1]
    drop_caches()
    fd, count = os.open(shard, os.O_RDONLY | os.O_DIRECT), shard.stat().st_size // (4 << 20)
    disk = in_threads(4, reader(fd, count)) if count else 0.0
    os.close(fd)
    host = shard.stat().st_size / host_limit(options)
    cores = len(os.sched_getaffinity(0))
    more = disk * records(options)["nbytes"] / shard.stat().st_size
    return {
        "read the base": disk,
        "read the records": more,
        "copy the state": host,
        "apply the records": arithmetic(options, nbytes) / cores,
    }


def arithmetic(options: argparse.Namespace, nbytes: int) -> float:
    """Seconds of one core to decompress and add all records, by a sample that is applied eight at a time."""
    rng, leaf = np.random.default_rng(0), CodedLeaf("x", "float32", (ENTRIES,), "parameter")
    (part,) = arrange([leaf], wanted(options))
    state, memory, other = np.zeros(ENTRIES, np.float32), Memory(), Memory()
    sections = []
    for _ in range(8):
        value = state + rng.standard_normal(ENTRIES).astype(np.float32) * np.float32(1e-4)
        sections.append(memoryview(b"".join(code(part, [value], state, memory, reuse=True)[0])))
    started = time.thread_time()
    moves = [read(part, section, other) for section in sections]
    with one_thread():
        started = time.process_time()
        apply(part, moves, np.zeros(ENTRIES, np.float32))
        spent = time.process_time() - started
    return spent / len(sections) * records(options)["count"] * nbytes / state.nbytes


@contextlib.contextmanager
def one_thread():
    from stepwell.storage.codecs import parts

    usual = parts._SHARED_NBYTES
    parts._SHARED_NBYTES = 1 << 62
    try:
        yield
    finally:
        parts._SHARED_NBYTES = usual


def take(source: str, target: str) -> None:
    """Large files, which nobody changes, are the same ones: a new copy may be colder, or warmer."""
    (os.link if os.path.getsize(source) > 1 << 20 else shutil.copy2)(source, target)


def run(role: str, options: argparse.Namespace) -> dict[str, Any]:
    names = ("run", "parameters", "records", "deltas", "device", "batch", "out")
    command = [sys.executable, __file__, f"--role={role}", *(f"--{name}={getattr(options, name)}" for name in names)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) if role == "restore" else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parameters", type=float, default=126e6)
    parser.add_argument("--records", type=int, default=62)
    parser.add_argument("--deltas", default="lc(bits=2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--run", default="")
    parser.add_argument("--role", choices=["make", "restore"])
    options = parser.parse_args()
    if options.role:
        return {"make": make, "restore": bring_back}[options.role](options)
    scratch = Path(tempfile.mkdtemp(prefix="stepwell-chain-", dir=options.scratch))
    try:
        source = options.run or str(scratch / "made")
        if not Path(source).exists():
            run("make", argparse.Namespace(**{**vars(options), "run": source}))
        found = []
        for number in range(options.repeats):
            wait_while_quiet()
            options.run = str(scratch / f"run{number}")
            shutil.copytree(source, options.run, copy_function=take)  # a restore begins a lineage
            drop_caches()
            found.append(run("restore", options))
            shutil.rmtree(options.run)
            print(json.dumps(found[-1]), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(found, options)
    return None


def report(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    best = min(found, key=lambda one: one["seconds"])
    limit, seconds = best["limits"], best["seconds"]
    lines = [[label, f"{spent:.2f}", f"{spent / seconds:.2f}"] for label, spent in best["phases"].items()]
    table = rows(["what", "seconds", "of the restore"], [*lines, ["restore() in all", f"{seconds:.2f}", "1"]])
    whole = sum(limit.values())
    table += "\n" + rows(
        ["limit of this machine", "seconds", "restore / limit"],
        [*([label, f"{spent:.2f}", f"{seconds / spent:.1f}"] for label, spent in limit.items() if spent),
         ["one after the other", f"{whole:.2f}", f"{seconds / whole:.2f}"]],
    )  # fmt: skip
    each = ", ".join(f"{one['seconds']:.2f}" for one in found)
    taken, live = (best[name] / best["state_bytes"] for name in ("taken_bytes", "live_bytes"))
    text = (
        f"{best['parameter_bytes'] / 4e6:.0f} M parameters, a state of {best['state_bytes'] / 1e9:.2f} GB, "
        f"{best['records']['count']} records of {options.deltas} with {best['records']['nbytes'] / 1e9:.2f} GB in all, "
        f"restored in {seconds:.2f} s (best of {len(found)}: {each}), "
        f"{best['cpu_seconds']:.1f} s of CPU time. Memory taken meanwhile: {taken:.2f} times the state, "
        f"of which moments that are restored to, and stay, are {live:.2f}.\n\n{table}"
    )
    print(text)
    save("chain_restore", "Restore of a chain of records", {"restores": found}, text, None, options.out,
         options.device, "all used")  # fmt: skip


if __name__ == "__main__":
    main()
