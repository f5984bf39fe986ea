"""What the automatic frequency really costs, on a slow disk: training beside a twin that never checkpoints.

    python benchmarks/slow_disk.py [--rate 40] [--iterations 500] [--rounds 2] [--out DIR]

Each run is a process of its own; twins run before, between and after the automatic ones, so that a machine that becomes
slower meanwhile does not count. The disk is slowed by the kernel (blkio cgroup), which needs root; where that is not
possible the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GROUP = Path("/sys/fs/cgroup/blkio/stepwell-slow-disk")
BOUND = 0.035


def train(where: Path, mode: str, iterations: int, out: Path) -> None:
    import torch

    import stepwell

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    policy = stepwell.Never() if mode == "twin" else stepwell.Auto(overhead=BOUND)
    ckpt = stepwell.Checkpointer(where, model=model, optimizer=optimizer, policy=policy)
    ckpt.restore()
    batch, ends = torch.randn(384, 768), []
    for _ in range(10 + iterations):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ends.append(time.monotonic())
    found = {"seconds": ends[-1] - ends[9], "policy": ckpt.status().policy}
    ckpt.close(save=False)
    out.write_text(json.dumps(found))


def slow_down(where: Path, rate: float) -> str:
    """Let this process and its children write at most so many bytes a second there. Returns how, or why not."""
    number = os.stat(where).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "blkio.throttle.write_bps_device").write_text(f"{device} {int(rate)}")
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        return f"not slowed down: {error.strerror}"
    return f"slowed down to {rate / 1e6:.0f} MB/s by the kernel (blkio)"


def one(mode: str, iterations: int, folder: Path) -> dict[str, Any]:
    where, out = folder / f"run-{time.monotonic_ns()}", folder / "result.json"
    command = [sys.executable, __file__, "--child", str(where), mode, str(iterations), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text())
    events = [json.loads(line) for line in (where / "events.jsonl").read_text().splitlines()]
    found |= {"mode": mode, "commits": sum(event["kind"] == "commit" for event in events)}
    found["decisions"] = [event for event in events if event["kind"] == "decision"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=40, help="MB/s")
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "slow-disk")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        where, mode, iterations, out = options.child
        train(Path(where), mode, int(iterations), Path(out))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        disk = slow_down(Path(folder), options.rate * 1e6)
        runs = [one("twin", options.iterations, Path(folder))]
        for _ in range(options.rounds):
            runs += [one(mode, options.iterations, Path(folder)) for mode in ("automatic", "twin")]
    rows = [
        f"| {run['mode']} | {run['seconds']:.2f} | {_overhead(runs, number)} | {run['commits']} | {run['policy']} |"
        for number, run in enumerate(runs)
    ]
    measured = [_ratio(runs, number) for number, run in enumerate(runs) if run["mode"] == "automatic"]
    text = "\n".join(
        [
            f"# Automatic frequency on a slow disk, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
            "",
            f"{os.cpu_count()} cores; disk {disk}; {options.iterations} iterations; bound {100 * BOUND:g} %.",
            f"Command: `{' '.join(['python', 'benchmarks/slow_disk.py', *sys.argv[1:]])}`",
            "",
            "| run | seconds | overhead beside the twins before and after | checkpoints | the policy says |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Mean overhead {100 * statistics.fmean(measured):.2f} %. Two twins differ by up to "
            f"{100 * _spread([run['seconds'] for run in runs if run['mode'] == 'twin']):.1f} %.",
            "",
        ]
    )
    (options.out / "slow-disk.json").write_text(json.dumps({"disk": disk, "runs": runs}, indent=1) + "\n")
    (options.out / "slow-disk.md").write_text(text)
    print(text)


def _ratio(runs: list[dict[str, Any]], number: int) -> float:
    around = (runs[number - 1]["seconds"] + runs[number + 1]["seconds"]) / 2
    return float(runs[number]["seconds"] / around - 1)


def _overhead(runs: list[dict[str, Any]], number: int) -> str:
    return f"{100 * _ratio(runs, number):.2f} %" if runs[number]["mode"] == "automatic" else ""


def _spread(values: list[float]) -> float:
    return max(values) / min(values) - 1


if __name__ == "__main__":
    main()
