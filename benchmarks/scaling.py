"""How stepwell's stall grows with the size of the state and with the number of its tensors.

    python benchmarks/scaling.py [--out build/scaling] [--quick]

For every state: blocked time (by how much the saving iteration is longer), host time inside save(), and beside them
what the copies alone need: on the CPU a copy of the same tensors by one thread into warm memory, on CUDA the same
copies issued one by one into page-locked memory on a side stream (host time to issue, device time to run).
The loop is the worst case on the CPU: a few milliseconds that change every tensor, nothing to hide a copy behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "src")]

SAVES, CLEAN, FIXED_TENSORS = 7, 12, 300
SIZES = {"cpu": (0.1, 1.0, 4.0), "cuda": (0.1, 1.0, 10.0)}
FIXED_GB = {"cpu": 0.3, "cuda": 1.0}
COUNTS = (10, 100, 1000, 10000)


class Tensors(nn.Module):
    """A state of equal tensors."""

    def __init__(self, gigabytes: float, count: int, device: str) -> None:
        super().__init__()
        each = max(16, int(gigabytes * 1e9 / 4 / count))
        self.parts = nn.ParameterList(torch.full((each,), 0.5, device=device) for _ in range(count))


def busy(device: str) -> Any:
    """What runs between two steps: about 150 ms of products on CUDA, next to nothing on the CPU."""
    if device == "cpu":
        scratch = [torch.zeros(16) for _ in range(64)]
        return lambda: [tensor.add_(1.0) for _ in range(4) for tensor in scratch]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return lambda: [torch.mm(a, a) for _ in range(100)]


def copies_alone(tensors: list[torch.Tensor], device: str) -> dict[str, float]:
    """What moving the bytes costs without us: medians of five, the first left out."""
    if device == "cpu":
        torch.set_num_threads(1)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
    else:
        sizes = [tensor.numel() for tensor in tensors]
        targets = list(torch.empty(sum(sizes), pin_memory=True).split(sizes))
    stream = torch.cuda.Stream() if device == "cuda" else None
    issued, ran = [], []
    for _ in range(6):
        started = time.monotonic()
        if stream is None:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)
        else:
            torch.cuda.synchronize()
            started = time.monotonic()
            with torch.cuda.stream(stream):
                for target, tensor in zip(targets, tensors, strict=True):
                    target.copy_(tensor, non_blocking=True)
        issued.append(time.monotonic() - started)
        if stream is not None:
            stream.synchronize()
        ran.append(time.monotonic() - started)
    return {"issue": statistics.median(issued[1:]), "copies": statistics.median(ran[1:])}


def measure(gigabytes: float, count: int, device: str, where: Path) -> dict[str, Any]:
    """One state in this process."""
    from peer.clock import Marks
    from peer.workload import Touch

    import stepwell

    torch.set_num_threads(2 if device == "cpu" else 8)
    model = Tensors(gigabytes, count, device)
    tensors = [parameter.detach() for parameter in model.parameters()]
    views = [tensor[:1] for tensor in tensors]
    optimizer = Touch(model.parameters(), lambda: torch._foreach_add_(views, 1.0))
    compute, marks = busy(device), Marks(torch.device(device))
    checkpointer = stepwell.Checkpointer(where, policy=stepwell.Every(steps=10**9), model=model, optimizer=optimizer)

    def iterate() -> None:
        compute()
        with torch.no_grad():
            optimizer.step()
        marks.mark()

    def train(iterations: int) -> None:
        for _ in range(iterations):
            iterate()
            checkpointer.step()

    train(3)
    time.sleep(1 + 1.2 * gigabytes)  # memory is made ready in the background
    calls, at = [], []
    for _ in range(SAVES + 2):
        train(CLEAN)
        iterate()
        started = time.monotonic()
        handle = checkpointer.save()
        calls.append(time.monotonic() - started)
        at.append(len(marks) - 1)
        train(2)
        handle.wait(300)
    ends = marks.ends()
    length = [b - a for a, b in pairwise(ends)]
    clean = statistics.median(length[n] for save in at for n in range(save - CLEAN + 2, save))
    checkpointer.close(save=False)
    blocked = [length[n] - clean for n in at[2:]]
    return {
        "gigabytes": sum(tensor.nbytes for tensor in tensors) / 1e9,
        "tensors": count,
        "clean": clean,
        "blocked": {"n": len(blocked), "median": statistics.median(blocked), "max": max(blocked)},
        "call": {"n": len(blocked), "median": statistics.median(calls[2:]), "max": max(calls[2:])},
        **copies_alone(tensors, device),
    }


def in_a_child(gigabytes: float, count: int, device: str, out: Path) -> dict[str, Any]:
    """A fresh process per state. A failure is a line with a reason."""
    folder = Path(tempfile.mkdtemp(prefix="scaling-", dir=out))
    command = [sys.executable, __file__, "--child", str(gigabytes), str(count), device, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        result = folder / "result.json"
        if done.returncode or not result.exists():
            return {"gigabytes": gigabytes, "tensors": count, "error": done.stderr[-800:]}
        return json.loads(result.read_text())
    except subprocess.TimeoutExpired:
        return {"gigabytes": gigabytes, "tensors": count, "error": "took too long"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# stepwell: stall against size and number of tensors, {result['date']}", ""]
    lines += [f"Machine: {result['machine']}", ""]
    lines += [
        "| GB | tensors | clean iteration ms | call ms (median / max) | blocked ms (median / max) | copies alone ms |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in [*result["by_size"], *result["by_count"]]:
        if "error" in row:
            lines.append(f"| {row['gigabytes']} | {row['tensors']} | {row['error'].splitlines()[-1][:100]} | | | |")
            continue
        call, blocked = (f"{1e3 * row[n]['median']:.1f} / {1e3 * row[n]['max']:.1f}" for n in ("call", "blocked"))
        alone = f"{1e3 * row['copies']:.1f} (issued in {1e3 * row['issue']:.1f})"
        cells = [f"{row['gigabytes']:.2f}", str(row["tensors"]), f"{1e3 * row['clean']:.1f}", call, blocked, alone]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5))
    panels = (("by_size", "gigabytes", "GB of state"), ("by_count", "tensors", "tensors"))
    for axis, (rows, key, label) in zip(axes, panels, strict=True):
        good = [row for row in result[rows] if "error" not in row]
        across = [row[key] for row in good]
        for name, style in (("blocked", "o-"), ("call", "s-")):
            values = [max(row[name]["median"] * 1e3, 0.01) for row in good]
            axis.plot(across, values, style, label=f"stepwell: {name}")
            axis.plot(
                across, [max(row[name]["max"] * 1e3, 0.01) for row in good], ":", color=axis.lines[-1].get_color()
            )
        axis.plot(across, [row["copies"] * 1e3 for row in good], "k--", label="the copies alone")
        if result["device"] == "cuda":
            axis.plot(across, [row["issue"] * 1e3 for row in good], "--", color="grey", label="issuing them one by one")
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds (dotted: worst)")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"Stall per save: {result['machine']}, {result['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "scaling")
    parser.add_argument("--sizes", help="gigabytes, with commas between them (default: what the device has room for)")
    parser.add_argument("--quick", action="store_true", help="small states only, to try the script")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        gigabytes, count, device, folder = options.child
        found = measure(float(gigabytes), int(count), device, Path(folder) / "run")
        (Path(folder) / "result.json").write_text(json.dumps(found))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, counts = ((0.02, 0.1), (10, 100, 1000)) if options.quick else (SIZES[device], COUNTS)
    sizes = tuple(float(text) for text in options.sizes.split(",")) if options.sizes else sizes
    fixed = 0.05 if options.quick else FIXED_GB[device]
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "machine": f"{name}, torch {torch.__version__}",
        "by_size": [],
        "by_count": [],
    }
    plan = [("by_size", size, FIXED_TENSORS) for size in sizes] + [("by_count", fixed, count) for count in counts]
    for part, gigabytes, count in plan:
        row = in_a_child(gigabytes, count, device, options.out)
        result[part].append(row)
        text = (
            row.get("error") or f"blocked {1e3 * row['blocked']['median']:.1f} ms, copies {1e3 * row['copies']:.1f} ms"
        )
        print(f"{gigabytes} GB in {count} tensors: {text}", file=sys.stderr, flush=True)
        (options.out / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "scaling.md").write_text(markdown(result))
    try:
        draw(result, options.out / "scaling.png")
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    print(markdown(result))


if __name__ == "__main__":
    main()
