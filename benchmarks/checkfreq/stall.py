"""(a) What each iteration waits: 300 iterations with a checkpoint every 15, three ways. The talk's VGG16 figure.

    python benchmarks/checkfreq/stall.py --out build/checkfreq [--quick]

synchronous    torch.save and fsync in the loop
persist-only   the copy blocks training, the write runs beside it (snapshot="blocking")
pipelined      copy and write both run beside it (stepwell's default)

All in one process, with clean iterations before, between and after; each way is compared with the clean ones around
it. Stall: by how much the saving iteration (all the training waits for is in it) is longer than the clean median. Lost:
the same for all iterations up to the next checkpoint, so slowed iterations count too.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import record
from loop import EveryNth, Loop, Segment, Synchronous, spans, warm
from networks import build
from record import ms, percent, times
from trail import Trail

import stepwell

ITERATIONS = 300
WAYS = {"synchronous": "", "persist-only": "blocking", "pipelined": "auto"}


def one_way(loop: Loop, way: str, folder: Path, iterations: int, every: int) -> dict[str, Any]:
    """The iterations of one way. The first save, for which memory is made ready, comes before them."""
    if way == "synchronous":
        saver = Synchronous(folder, loop.work)
        saver.save()
        turns = EveryNth(loop, every, saver.save)
        segment = loop.run(count=iterations + 2, after=turns)
        return {"segment": segment, "at": turns.at}
    tracked = {"model": loop.work.model, "optimizer": loop.work.optimizer}
    with stepwell.Checkpointer(
        folder, policy=stepwell.Every(steps=every), snapshot=WAYS[way], grace=None, **tracked
    ) as ckpt:
        loop.run(count=4, after=ckpt.step)
        ckpt.save().wait(300)
        before = len(loop.marks)
        segment = loop.run(count=iterations + 2, after=ckpt.step)
        ckpt.wait(300)
        offset = before - 4
        trail = Trail(folder)
        ckpt.close(save=False)
    saved = [item for item in trail.saved() if item.step > 4]
    facts = {"strategies": sorted({item.strategy for item in saved}), "skipped": len(trail.of("snapshot-skipped"))}
    facts["waited"] = [item.waited for item in saved]
    return {"segment": segment, "at": [offset + item.step - 1 for item in saved], **facts}


def measure(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    work = build(arguments["network"], device=options.device, quick=options.quick, precision=options.precision)
    loop = Loop(work)
    clean_count, every = (10, 5) if options.quick else (30, 15)
    warm(loop, quick=options.quick)
    cleans = [loop.run(count=clean_count)]
    clean = statistics.median(spans(cleans[0], loop.lengths()))
    begun, saver = time.monotonic(), Synchronous(Path(arguments["folder"]) / "probe", work)
    saver.save()
    synchronous = time.monotonic() - begun
    room = record.left(arguments) - 4 * clean_count * clean
    fits = int(0.85 * room / (3 * clean + synchronous / every * 1.6))
    iterations = max(4 * every, min(ITERATIONS, fits) // every * every)
    found = {}
    for way in WAYS:
        found[way] = one_way(loop, way, Path(arguments["folder"]) / way, iterations, every)
        loop.run(count=2)
        cleans.append(loop.run(count=clean_count))
    lengths = loop.lengths()
    facts = {"network": arguments["network"], "batch": work.batch, "state_bytes": work.state_bytes()}
    facts |= {"iterations": iterations, "every": every, "clean_segments": _medians(cleans, lengths)}
    return {
        **facts,
        "ways": {way: figures(item, cleans[n : n + 2], lengths) for n, (way, item) in enumerate(found.items())},
    }


def _medians(segments: list[Segment], lengths: list[float]) -> list[float]:
    return [statistics.median(spans(segment, lengths)) for segment in segments]


def figures(item: dict[str, Any], around: list[Segment], lengths: list[float]) -> dict[str, Any]:
    clean = statistics.median([value for segment in around for value in spans(segment, lengths)])
    segment, at = item["segment"], [n for n in item["at"] if n + 1 in item["segment"].numbers]
    ends = [*at[1:], segment.numbers[-1]]
    stalls = [lengths[n] - clean for n in at]
    lost = [sum(lengths[n] - clean for n in range(a, b)) for a, b in zip(at, ends, strict=True)]
    kept = {key: value for key, value in item.items() if key not in ("segment", "at")}
    return {
        **kept,
        "clean": clean,
        "checkpoints": len(at),
        "stall_total": sum(stalls),
        "stall_median": statistics.median(stalls) if stalls else None,
        "stall_worst": max(stalls, default=None),
        "lost_total": sum(lost),
        "lost_median": statistics.median(lost) if lost else None,
        "lengths": [round(lengths[n - 1], 6) for n in segment.numbers[1:]],
    }


def markdown(result: dict[str, Any]) -> str:
    text = "# Stall per checkpoint, three ways\n\n"
    for name, row in result["rows"].items():
        if "error" in row:
            text += f"{record.label(name)}: {row['error']}\n"
            continue
        text += (
            f"{record.label(name)}, batch {row['batch']}, {row['state_bytes'] / 1e6:.0f} MB of state,"
            f" {row['iterations']} iterations, a checkpoint every {row['every']}."
            " Target: pipelined at most 2 % of synchronous.\n\n"
        )
        base = row["ways"]["synchronous"]
        lines = []
        for way, found in row["ways"].items():
            share = found["stall_total"] / base["stall_total"]
            median = found["stall_median"] / base["stall_median"]
            cells = [way, str(found["checkpoints"]), ms(found["clean"]), ms(found["stall_median"])]
            cells += [ms(found["stall_worst"]), ms(found["stall_total"]), percent(share), times(1 / median)]
            lines.append([*cells, ms(found["lost_total"]), percent(found["lost_total"] / base["lost_total"])])
        head = ["", "checkpoints", "clean iteration ms", "stall median ms", "worst ms", "total ms"]
        head += ["of synchronous", "less stall (median)", "lost, total ms", "lost, of synchronous"]
        text += record.table(head, lines)
    return text


def draw(result: dict[str, Any], pyplot: Any) -> None:
    row = next(row for row in result["rows"].values() if "error" not in row)
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 8), sharex=True, sharey=True)
    for axis, (way, found) in zip(axes, row["ways"].items(), strict=True):
        axis.plot([1e3 * value for value in found["lengths"]], linewidth=0.8)
        axis.axhline(1e3 * found["clean"], color="black", linestyle=":", linewidth=0.8)
        axis.set(title=way, ylabel="iteration, ms")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("iteration")
    figure.suptitle(f"{record.label(row['network'])}, a checkpoint every {row['every']}; dotted: clean")
    figure.tight_layout()


def main() -> None:
    options = record.parse(record.parser(__doc__, seconds=150, networks="vgg16"))
    record.one_process_each("stall", options, measure, markdown, draw)


if __name__ == "__main__":
    main()
