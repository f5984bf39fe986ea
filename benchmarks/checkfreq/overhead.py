"""(b) What the automatic frequency costs, on seven networks, beside synchronous saving at the same frequency.

    python benchmarks/checkfreq/overhead.py --out build/checkfreq [--quick]

In one process a network: clean iterations (no checkpointer at all), `Auto()`, clean, torch.save + fsync after as many
iterations as Auto let pass, clean. Each is compared with the clean ones on both sides of it.

Overhead: over whole periods, from the first trigger after the first decision to the last trigger, against as many
clean iterations (means). "with the start" takes all iterations of the run, the search for the interval included.
"within the run" compares with those of its own iterations that no checkpoint was under way in, if there were enough.
Noise: by how much the two clean segments around the automatic one differ.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from itertools import pairwise
from pathlib import Path
from typing import Any

import record
from loop import EveryNth, Loop, Segment, Synchronous, spans, summary
from networks import build
from record import ms, percent, secs, times
from trail import Trail, count_commits

import stepwell

BOUND, WANTED = 0.035, 20


def measure(options: Any, arguments: dict[str, Any], *, batch: int | None = None) -> dict[str, Any]:
    kind = {"device": options.device, "quick": options.quick, "precision": options.precision}
    work = build(arguments["network"], batch=batch or options.batch, **kind)
    loop, folder = Loop(work), Path(arguments["folder"])
    loop.run(count=5)
    loop.run(seconds=0.5 if options.quick else 4)  # clocks settle, too
    left = max(record.left(arguments), 10)  # a slow start does not leave it empty
    each = max(0.05 * left, 0.5)
    before = loop.run(seconds=each)
    auto = automatic(loop, folder / "auto", least=0.3 * left, most=0.58 * left)
    loop.run(count=2)
    between = loop.run(seconds=each)
    found = {"network": arguments["network"], "batch": work.batch, "state_bytes": work.state_bytes()}
    lengths = loop.lengths()
    found |= automatic_figures(loop, auto, before, between, lengths)
    record.answer(arguments, found)  # what is known stays, should the rest take too long
    if found["every"] is None:
        return found
    turns = synchronous(loop, folder / "sync", found["every"], seconds=record.left(arguments) - each - 1)
    loop.run(count=2)
    after = loop.run(seconds=each)
    return found | synchronous_figures(turns, between, after, loop.lengths())


def automatic(loop: Loop, folder: Path, *, least: float, most: float) -> dict[str, Any]:
    tracked = {"model": loop.work.model, "optimizer": loop.work.optimizer}
    started, first = time.monotonic(), len(loop.marks)

    def is_enough() -> bool:
        return time.monotonic() - started > least and count_commits(folder) >= WANTED + 4

    with stepwell.Checkpointer(folder, policy=stepwell.Auto(overhead=BOUND), grace=None, **tracked) as ckpt:
        segment = loop.run(seconds=most, after=ckpt.step, until=is_enough)
        ckpt.wait(300)
        sentence = ckpt.status().policy
        ckpt.close(save=False)
    return {"segment": segment, "first": first, "trail": Trail(folder), "sentence": sentence}


def automatic_figures(
    loop: Loop, auto: dict[str, Any], before: Segment, after: Segment, lengths: list[float]
) -> dict[str, Any]:
    trail, segment, ends = auto["trail"], auto["segment"], loop.marks.ends()
    one, two = (statistics.fmean(spans(part, lengths)) for part in (before, after))
    clean = (one + two) / 2
    saved, decisions = trail.saved(), trail.decisions()
    at = {item.step: auto["first"] + item.step - 1 for item in saved}
    everything = statistics.fmean(spans(segment, lengths)) / clean - 1
    found: dict[str, Any] = {
        "clean": clean,
        "noise": abs(one - two) / clean,
        "iterations": segment.count,
        "seconds": sum(spans(segment, lengths)),
        "commits": len(saved),
        "nbytes": saved[-1].nbytes if saved else 0,
        "skipped": len(trail.of("snapshot-skipped")),
        "strategies": sorted({item.strategy for item in saved}),
        "waited": summary([item.waited for item in saved[1:]]),
        "durable": summary([item.committed - loop.wall - ends[at[item.step]] for item in saved[1:]]),
        "write": summary([event["seconds"] for event in trail.of("persist")][1:]),
        "overhead_with_start": everything,
        "sentence": auto["sentence"],
        "decisions": [_decision(event) for event in decisions],
        "every": None,
    }
    settled = [at[item.step] for item in saved if decisions and item.step >= decisions[0]["step"]]
    if len(settled) < 3:
        return {**found, "note": "too few checkpoints after the first decision"}
    low, high = settled[0], settled[-1]
    spent, count = sum(lengths[low:high]), high - low
    gaps = [b - a for a, b in pairwise(settled)]
    last = found["decisions"][-1]
    busy = {n for item in saved for n in range(at[item.step], _last(ends, item.committed - loop.wall) + 1)}
    calm = [lengths[n] for n in range(low, high) if n not in busy]
    spacing = statistics.median(ends[b] - ends[a] for a, b in pairwise(settled))
    return {
        **found,
        "overhead": spent / (count * clean) - 1,
        "overhead_in_run": spent / (count * statistics.fmean(calm)) - 1 if len(calm) > 0.1 * count else None,
        "cost": (spent - count * clean) / len(gaps),
        "every": max(1, round(statistics.median(gaps))),
        "spacing": spacing,
        "chosen": last["seconds"],
        "ratio": max(item["seconds"] / item["floor"] for item in found["decisions"] if item["floor"]),
        "spacing_ratio": spacing / last["floor"] if last["floor"] else None,
        "settled_checkpoints": len(settled),
    }


def _last(ends: list[float], moment: float) -> int:
    """The iteration in which a moment lies."""
    return bisect(ends, moment) - 1


def _decision(event: dict[str, Any]) -> dict[str, Any]:
    budget, pipe = event["checkpoint_seconds"] / event["overhead_bound"], event["durable_seconds"]
    kept = {key: event[key] for key in ("step", "seconds", "term", "predicted_overhead", "mtbf_seconds", "time")}
    return {**kept, "budget": budget, "pipe": pipe, "floor": max(budget, pipe)}


def synchronous(loop: Loop, folder: Path, every: int, *, seconds: float) -> list[int]:
    """Marks after which it saved; at least three periods."""
    saver = Synchronous(folder, loop.work)
    saver.save()
    turns = EveryNth(loop, every, saver.save)
    started = time.monotonic()
    while len(turns.at) < 4 or (len(turns.at) < WANTED and time.monotonic() - started < seconds):
        loop.run(count=every, after=turns)
    loop.run(count=1)
    return turns.at


def synchronous_figures(turns: list[int], before: Segment, after: Segment, lengths: list[float]) -> dict[str, Any]:
    clean = statistics.fmean(statistics.fmean(spans(part, lengths)) for part in (before, after))
    low, high = turns[0], turns[-1]
    spent, count = sum(lengths[low:high]), high - low
    cost = (spent - count * clean) / (len(turns) - 1)
    return {"sync_overhead": spent / (count * clean) - 1, "sync_cost": cost, "sync_saves": len(turns)}


def columns(name: str, row: dict[str, Any]) -> dict[str, str]:
    last, auto, sync = row["decisions"][-1], row["overhead"], row.get("sync_overhead")
    return {
        "": record.label(name),
        "state MB": f"{row['state_bytes'] / 1e6:.0f}",
        "batch": str(row["batch"]),
        "clean iteration ms": ms(row["clean"]),
        "commits": str(row["commits"]),
        "chosen s (term)": f"{secs(row['chosen'])} ({last['term']})",
        "t_budget s": secs(last["budget"]),
        "t_pipe s": secs(last["pipe"]),
        "the write alone s": secs(row["write"].get("median")),
        "chosen : max of both": times(row["ratio"]),
        "iterations between": f"{row['every']} = {secs(row['spacing'])} s",
        "overhead": percent(auto),
        "within the run": percent(row["overhead_in_run"]),
        "with the start": percent(row["overhead_with_start"]),
        "noise": percent(row["noise"]),
        "cost of one ms": ms(row["cost"]),
        "synchronous": percent(sync),
        "synchronous : automatic": times(None if sync is None else sync / max(auto, row["noise"], 1e-4)),
    }


def markdown(result: dict[str, Any]) -> str:
    text = (
        f"# Overhead of the automatic frequency, bound {100 * BOUND:.1f} %\n\nTargets: overhead at most 3.5 %, at least"
        f" {WANTED} commits, chosen at most 1.2x max(t_budget, t_pipe), synchronous at least 5x as much. The last"
        " column takes the noise as the overhead where that is larger. The failure rate is unknown.\n\n"
    )
    good = {name: columns(name, row) for name, row in result["rows"].items() if "overhead" in row}
    if good:
        text += record.table(list(next(iter(good.values()))), [list(row.values()) for row in good.values()])
    for name, row in result["rows"].items():
        if name not in good:
            text += f"\n{record.label(name)}: {row.get('error') or row['note']}\n"
    return text


def draw(result: dict[str, Any], pyplot: Any) -> None:
    rows = {name: row for name, row in result["rows"].items() if "overhead" in row}
    figure, axis = pyplot.subplots(figsize=(11, 5))
    for shift, (key, text) in enumerate({"overhead": "automatic", "sync_overhead": "synchronous, as often"}.items()):
        values = [100 * max(row.get(key) or 0.0, 1e-4) for row in rows.values()]
        places = [at + 0.4 * (shift - 0.5) for at in range(len(rows))]
        axis.bar(places, values, 0.38, label=text)
        for place, value in zip(places, values, strict=True):
            axis.text(place, value, f"{value:.2g}", ha="center", va="bottom", fontsize=8)
    axis.axhline(100 * BOUND, color="black", linestyle="--", linewidth=1, label="bound")
    axis.set_xticks(range(len(rows)), [record.label(name) for name in rows])
    axis.set(yscale="log", ylabel="overhead, %", title="Overhead at the automatic frequency")
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    figure.tight_layout()


def main() -> None:
    options = record.parse(record.parser(__doc__, seconds=540))
    record.one_process_each("overhead", options, measure, markdown, draw)


if __name__ == "__main__":
    main()
