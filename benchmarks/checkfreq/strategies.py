"""(f) What training waits for a snapshot taken on the device, beside the next iteration, and blocking; seven networks.

    python benchmarks/checkfreq/strategies.py --out build/checkfreq [--quick]

device      copied on the device first, drained to the host afterwards (the talk: up to 10x cheaper than the host copy)
pipelined   copied to the host while the next forward and backward run (snapshot="overlap")
blocking    copied to the host while training waits

Stall: by how much the saving iteration is longer than the median of clean ones just before. Saves come one at a time:
each is durable before the next clean iterations begin, so no write disturbs them.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import record
from loop import Loop, OnDemand, spans, summary, warm
from networks import build
from record import ms, times
from trail import Trail

import stepwell

STRATEGIES = {"device": "device", "pipelined": "overlap", "blocking": "blocking"}
CLEAN = 6


def one(loop: Loop, strategy: str, folder: Path, *, seconds: float, most: int) -> dict[str, Any]:
    """Checkpoints, one by one, for so long; at least four, of which three count."""
    tracked, policy = {"model": loop.work.model, "optimizer": loop.work.optimizer}, OnDemand()
    before = len(loop.marks)
    with stepwell.Checkpointer(folder, policy=policy, snapshot=strategy, grace=None, **tracked) as ckpt:
        loop.run(count=3, after=ckpt.step)
        ckpt.save().wait(300)
        started, saves = time.monotonic(), 0
        while saves < 4 or (saves < most and time.monotonic() - started < seconds):
            loop.run(count=CLEAN, after=ckpt.step)
            policy.due = True
            loop.run(count=3, after=ckpt.step)
            ckpt.wait(300)
            saves += 1
        ckpt.close(save=False)
    lengths, saved = loop.lengths(), Trail(folder).saved()[2:]  # the first ones build what the others reuse
    at = [before + item.step - 1 for item in saved]
    stalls = [lengths[n] - statistics.median(lengths[n - CLEAN + 1 : n]) for n in at]
    copied = [item.copied for item in saved]
    return {"stall": summary(stalls), "copy": summary(copied), "taken": sorted({item.strategy for item in saved})}


def measure(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    work = build(arguments["network"], device=options.device, quick=options.quick, precision=options.precision)
    loop = Loop(work)
    warm(loop, quick=options.quick)
    segment = loop.run(count=8)
    lengths = loop.lengths()
    found: dict[str, Any] = {"network": arguments["network"], "batch": work.batch, "state_bytes": work.state_bytes()}
    found["clean"] = statistics.median(spans(segment, lengths))
    for at, (name, strategy) in enumerate(STRATEGIES.items()):
        each = record.left(arguments) / (len(STRATEGIES) - at) - 2
        found[name] = one(
            loop, strategy, Path(arguments["folder"]) / name, seconds=each, most=5 if options.quick else 12
        )
    return found


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for name, row in result["rows"].items():
        if "error" in row:
            lines.append([record.label(name), row["error"], *[""] * 9])
            continue
        stalls = {key: row[key]["stall"]["median"] for key in STRATEGIES}
        cells = [record.label(name), f"{row['state_bytes'] / 1e6:.0f}", str(row["batch"]), ms(row["clean"])]
        cells += [ms(stalls[key]) for key in STRATEGIES]
        cells.append(ms(row["blocking"]["copy"].get("median")))
        cells += [_ratio(stalls["blocking"], stalls[key]) for key in ("device", "pipelined")]
        taken = {key: row[key]["taken"] for key in STRATEGIES if row[key]["taken"] != [STRATEGIES[key]]}
        lines.append([*cells, "; ".join(f"{key}: {', '.join(value)}" for key, value in taken.items())])
    head = ["", "state MB", "batch", "clean iteration ms", "device ms", "pipelined ms", "blocking ms"]
    head += ["blocking copy ms", "blocking : device", "blocking : pipelined", "taken otherwise than asked"]
    text = "# Visible stall of a snapshot, by strategy\n\nMedians over the saves after the first. A stall below 0.1 ms"
    return f"{text} counts as 0.1 ms in the ratios.\n\n{record.table(head, lines)}"


def _ratio(blocking: float, other: float) -> str:
    return times(blocking / max(other, 1e-4))


def draw(result: dict[str, Any], pyplot: Any) -> None:
    rows = {name: row for name, row in result["rows"].items() if "error" not in row}
    figure, axis = pyplot.subplots(figsize=(11, 5))
    for shift, key in enumerate(STRATEGIES):
        values = [max(1e3 * row[key]["stall"]["median"], 0.1) for row in rows.values()]
        axis.bar([at + 0.27 * (shift - 1) for at in range(len(rows))], values, 0.25, label=key)
    axis.set_xticks(range(len(rows)), [record.label(name) for name in rows])
    axis.set(yscale="log", ylabel="stall per snapshot, ms", title="Device, pipelined and blocking snapshots")
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    figure.tight_layout()


def main() -> None:
    options = record.parse(record.parser(__doc__, seconds=150))
    record.one_process_each("strategies", options, measure, markdown, draw)


if __name__ == "__main__":
    main()
