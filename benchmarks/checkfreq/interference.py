"""(d) Neighbours on the disk, on all cores and on the GPU, with and without adaptation; and a small, slow server.

    python benchmarks/checkfreq/interference.py --out build/checkfreq [--quick] [--short [--rate 300]]

In one process five times the same timeline (before; a neighbour comes, goes; the next one comes, goes):
    without   no checkpoints; once more at the end
    adaptive  `Auto()`
    fixed     `Every(steps=n)`, n as Auto had it before the first neighbour came
    waiting   the same n, as the original does it: training waits until the last checkpoint is durable, then begins one
Overhead of each phase is against the same phase without checkpoints, so that what the neighbour itself costs is on
neither side; noise is by how much the two runs without differ. "late" is a phase's second half: what is left when the
policy had time to react. "back after": seconds from the neighbour's end until the interval was within a third of what
it was before all neighbours.

--short: iterations of a few milliseconds, and a disk of --rate MB/s that all processes share. The disk's neighbour
gets most of it.

The small server (the talk's second one): device memory capped at 11 GiB, a smaller batch, and a disk of 150 MB/s. The
disk is slowed without root: `slow_disk.c`, compiled here and preloaded, makes every large write of the trainer and its
agent wait its turn. Where there is no C compiler that pass is left out, and the table says so.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import overhead
import record
import torch
from loop import EveryNth, Loop, OnDemand, Segment, spans, warm
from neighbours import Neighbours
from networks import NETWORKS, Missing, build
from record import percent, secs
from trail import Trail

import stepwell

RUNS = ("without", "adaptive", "fixed", "waiting", "without again")
SHORT_RATE, SHORT_BLOCK = {"cuda": 1000.0, "cpu": 300.0}, 1 << 24
"""MB/s of the shared disk; what its neighbour writes at once."""
BACK, WARM_SECONDS = 4 / 3, 4.0
SERVER, SERVER_MEMORY, SERVER_RATE = "small server", 11 << 30, 150e6


def timeline(kinds: list[str], seconds: float) -> list[tuple[str, str, float]]:
    """(phase, neighbour, seconds), shares of what there is."""
    unit = seconds / (2 + 5 * len(kinds))
    phases = [("before", "", 2 * unit)]
    for kind in kinds:
        phases += [(kind, kind, 3 * unit), (f"after {kind}", "", 2 * unit)]
    return phases


def measure(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    folder, kinds = Path(arguments["folder"]), arguments["kinds"]
    work = build(arguments["network"], device=options.device, quick=options.quick, precision=options.precision)
    loop = Loop(work)
    warm(loop, quick=options.quick)
    if options.short:
        loop.run(seconds=WARM_SECONDS)
    block = {"block_bytes": SHORT_BLOCK} if options.short and not options.quick else {}
    neighbours = {kind: Neighbours(kind, folder, quick=options.quick, **block) for kind in kinds}
    found: dict[str, Any] = {"network": arguments["network"], "batch": work.batch, "kinds": kinds, "runs": {}}
    found["state_bytes"] = work.state_bytes()
    try:
        for number, name in enumerate(RUNS):
            each = max(record.left(arguments) / (len(RUNS) - number), 5.0)
            found["runs"][name] = one_run(loop, folder / name, name, timeline(kinds, each), neighbours, found)
            record.answer(arguments, found)
    finally:
        for neighbour in neighbours.values():
            neighbour.end()
    return found


def one_run(
    loop: Loop,
    folder: Path,
    name: str,
    phases: list[tuple[str, str, float]],
    neighbours: dict[str, Neighbours],
    found: dict[str, Any],
) -> dict[str, Any]:
    if name.startswith("without"):
        segments = run_phases(loop, phases, neighbours, lambda: None)
        return figures(loop, segments, None, 0)
    demand, every = OnDemand(), found["runs"].get("adaptive", {}).get("every", 1)
    policy: Any = {"adaptive": stepwell.Auto(), "fixed": stepwell.Every(steps=every), "waiting": demand}[name]
    tracked, first = {"model": loop.work.model, "optimizer": loop.work.optimizer}, len(loop.marks)
    with stepwell.Checkpointer(folder, policy=policy, grace=None, **tracked) as ckpt:
        loop.run(count=3, after=ckpt.step)
        ckpt.save().wait(300)  # memory is ready

        def save() -> None:
            ckpt.wait(300)
            demand.due = True

        turns = EveryNth(loop, every, save if name == "waiting" else lambda: None)

        def after() -> None:
            turns()
            ckpt.step()

        segments = run_phases(loop, phases, neighbours, after)
        ckpt.wait(300)
        ckpt.close(save=False)
    return figures(loop, segments, Trail(folder), first)


def run_phases(
    loop: Loop, phases: list[tuple[str, str, float]], neighbours: dict[str, Neighbours], after: Callable[[], None]
) -> dict[str, Segment]:
    segments = {}
    for phase, kind, seconds in phases:
        if kind:
            neighbours[kind].on()
        segments[phase] = loop.run(seconds=seconds, after=after)
        if segments[phase].count < 2:  # a phase has one iteration that is all its own
            loop.run(count=2 - segments[phase].count, after=after)
            segments[phase] = Segment(segments[phase].first, 2)
        if kind:
            neighbours[kind].off()
    return segments


def figures(loop: Loop, segments: dict[str, Segment], trail: Trail | None, first: int) -> dict[str, Any]:
    lengths, ends = loop.lengths(), loop.marks.ends()
    start = ends[segments["before"].first]
    found: dict[str, Any] = {"phases": {}}
    for phase, segment in segments.items():
        values = spans(segment, lengths)
        facts = {"mean": statistics.fmean(values), "late": statistics.fmean(values[len(values) // 2 :])}
        found["phases"][phase] = {**facts, "from": ends[segment.first] - start, "to": ends[segment.numbers[-1]] - start}
    if trail is None:
        return found
    triggers = [ends[first + item.step - 1] - start for item in trail.saved()]
    found["triggers"] = triggers
    found["commits"], found["skipped"] = len(triggers), len(trail.of("snapshot-skipped"))
    moved = loop.wall + start
    decisions = [[event["time"] - moved, event["seconds"], event["term"]] for event in trail.decisions()]
    found["decisions"] = decisions
    for facts in found["phases"].values():
        inside = [moment for moment in triggers if facts["from"] <= moment < facts["to"]]
        gaps = [b - a for a, b in pairwise(inside)]
        facts["spacing"] = statistics.median(gaps) if gaps else None
        facts["checkpoints"] = len(inside)
        at = [value for moment, value, _ in decisions if moment < facts["to"]]
        during = [value for moment, value, _ in decisions if facts["from"] <= moment < facts["to"]]
        facts["chosen"], facts["highest"] = (at[-1] if at else None), max(during, default=at[-1] if at else None)
        facts["raised_after"] = _raised(decisions, inside, facts)
    before = found["phases"]["before"]
    found["interval_before"] = before["chosen"] or before["spacing"]
    found["every"] = max(1, round((before["spacing"] or 1.0) / before["mean"]))
    for facts in found["phases"].values():
        facts["back_after"] = _back(decisions, facts, found["interval_before"])
    return found


def _back(decisions: list[list[Any]], facts: dict[str, Any], before: float | None) -> float | None:
    """Seconds of a phase until the interval is what it was before all neighbours; None: not in this phase."""
    held = [value for moment, value, _ in decisions if moment < facts["from"]]
    if before is None or not held or held[-1] <= BACK * before:
        return 0.0 if before is not None and held else None
    return next((at - facts["from"] for at, value, _ in decisions if facts["from"] <= at < facts["to"]
                 and value <= BACK * before), None)  # fmt: skip


def _raised(decisions: list[list[Any]], triggers: list[float], facts: dict[str, Any]) -> int | None:
    """Checkpoints of a phase until the first decision that was longer by a tenth than what held before."""
    held = [value for moment, value, _ in decisions if moment < facts["from"]]
    for moment, value, _ in decisions:
        if held and facts["from"] <= moment < facts["to"] and value > 1.1 * held[-1]:
            return sum(trigger < moment for trigger in triggers)
    return None


def small_server(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The experiment of overhead.py, on less of everything."""
    batch = None if options.quick else NETWORKS[arguments["network"]].small_batch
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, SERVER_MEMORY / total))
    return overhead.measure(options, arguments, batch=batch)


def slow_disk(folder: Path, rate: float, *, is_shared: bool = False) -> tuple[dict[str, str], str]:
    """The variables that make writing slow, or why there are none."""
    library = folder / "slow_disk.so"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return {}, "no slow disk: there is no C compiler to build slow_disk.c with; left out"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(record.HERE / "slow_disk.c"), "-ldl"]
    done = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, f"no slow disk: {' '.join(done.stderr.split())[:200]}; left out"
    variables = {"LD_PRELOAD": str(library), "STEPWELL_BENCH_DISK_RATE": str(int(rate))}
    if is_shared:
        disk = folder / "disk"
        disk.write_bytes(bytes(8))
        variables["STEPWELL_BENCH_DISK_SHARED"] = str(disk)
    return variables, ""


# -- results ----------------------------------------------------------------------------------------------------------


def compare(row: dict[str, Any], run: str, phase: str, which: str) -> float | None:
    if run not in row["runs"]:
        return None
    return row["runs"][run]["phases"][phase][which] / base(row, phase, which) - 1


def base(row: dict[str, Any], phase: str, which: str) -> float:
    """Of the runs without checkpoints."""
    runs = [row["runs"][name] for name in ("without", "without again") if name in row["runs"]]
    return statistics.fmean(run["phases"][phase][which] for run in runs)


def noise(row: dict[str, Any], phase: str) -> float | None:
    if "without again" not in row["runs"]:
        return None
    one, two = (row["runs"][name]["phases"][phase]["mean"] for name in ("without", "without again"))
    return abs(one - two) / min(one, two)


def markdown(result: dict[str, Any]) -> str:
    text = "# Neighbours, with and without adaptation\n\n"
    text += (
        "Reported for the original, a second job on the GPU: 5 % alone, 35 % with a fixed interval, 5 % adaptive.\n\n"
    )
    for key, row in result["rows"].items():
        if "error" in row:
            text += f"{key}: {row['error']}\n\n"
        elif key == SERVER:
            text += server_text(row)
        else:
            text += (
                f"{record.label(row['network'])}, batch {row['batch']}, {row['state_bytes'] / 1e6:.0f} MB of state,"
                f" {1e3 * base(row, 'before', 'mean'):.2f} ms an iteration by itself.{disk(row)}"
            )
            if "adaptive" in row["runs"]:
                text += f" Fixed and waiting: every {row['runs']['adaptive']['every']} steps."
            text += "\n\n"
            text += record.table(*neighbour_table(row)) + "\n"
    return text


def disk(row: dict[str, Any]) -> str:
    return f" The disk has {row['rate']:.0f} MB/s, which all share." if row.get("rate") else ""


def neighbour_table(row: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for phase in row["runs"]["without"]["phases"]:
        slower = base(row, phase, "mean") / base(row, "before", "mean")
        cells = [phase, f"{slower:.2f}x", percent(noise(row, phase))]
        for run in ("waiting", "fixed", "adaptive"):
            cells += [percent(compare(row, run, phase, "mean")), percent(compare(row, run, phase, "late"))]
        facts = row["runs"].get("adaptive", {}).get("phases", {}).get(phase, {})
        raised = facts.get("raised_after")
        cells += [secs(facts.get("chosen")), secs(facts.get("highest")), "-" if raised is None else str(raised)]
        cells.append(secs(facts.get("back_after")) if phase.startswith("after") else "-")
        lines.append([*cells, secs(facts.get("spacing")), str(facts.get("checkpoints", "-"))])
    head = ["phase", "iteration, no checkpoints", "noise", "waiting: overhead", "late", "fixed: overhead", "late"]
    head += ["adaptive: overhead", "late", "interval at its end s", "highest s", "raised after checkpoints"]
    head += ["back after s", "spacing s", "checkpoints"]
    return head, lines


def server_text(row: dict[str, Any]) -> str:
    if "overhead" not in row:
        return f"Small server: {row.get('note')}\n\n"
    rate = row["nbytes"] / row["durable"]["median"] if row["durable"]["n"] else 0.0
    last = row["decisions"][-1]
    return (
        f"Small server (device memory capped at {SERVER_MEMORY >> 30} GiB where there is a device, disk"
        f" {SERVER_RATE / 1e6:.0f} MB/s): {record.label(row['network'])}, batch {row['batch']},"
        f" {row['nbytes'] / 1e6:.0f} MB durable in {secs(row['durable'].get('median'))} s ({rate / 1e6:.0f} MB/s seen),"
        f" snapshots {', '.join(row['strategies'])}; {row['commits']} commits, interval {secs(row['chosen'])} s"
        f" ({last['term']}), overhead {percent(row['overhead'])} (noise {percent(row['noise'])}), synchronous as often"
        f" {percent(row.get('sync_overhead'))}.\n\n"
    )


def draw(result: dict[str, Any], pyplot: Any) -> None:
    row = next((row for row in result["rows"].values() if "runs" in row), None)
    if row is None or "adaptive" not in row["runs"]:
        return
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(12, 7))
    auto = row["runs"]["adaptive"]
    above.step([d[0] for d in auto["decisions"]], [d[1] for d in auto["decisions"]], where="post", label="chosen")
    above.plot(auto["triggers"][1:], [b - a for a, b in pairwise(auto["triggers"])], ".")
    for phase, facts in auto["phases"].items():
        if phase in row["kinds"]:
            above.axvspan(facts["from"], facts["to"], alpha=0.15, color="C3")
            above.text(facts["from"], above.get_ylim()[1], f" {phase}", va="top")
    above.set(
        xlabel="seconds", ylabel="interval, s", yscale="log", title="adaptive: interval chosen (line) and seen (dots)"
    )
    above.grid(alpha=0.3)
    names = list(auto["phases"])
    for shift, run in enumerate(run for run in ("waiting", "fixed", "adaptive") if run in row["runs"]):
        values = [100 * (compare(row, run, name, "mean") or 0.0) for name in names]
        below.bar([at + 0.27 * (shift - 1) for at in range(len(names))], values, 0.25, label=run)
    below.axhline(3.5, color="black", linestyle="--", linewidth=1)
    below.set_xticks(range(len(names)), names)
    below.set(ylabel="overhead, %", yscale="symlog")
    below.grid(axis="y", alpha=0.3)
    below.legend()
    figure.tight_layout()


def measure_short(options: Any, sheet: record.Record) -> None:
    rate = options.rate or SHORT_RATE[options.device]
    kinds = ["disk", "cpu", *(["gpu"] if options.device == "cuda" else [])]
    with record.scratch(options) as folder:
        variables, problem = slow_disk(folder, 1e6 * rate, is_shared=True)
        arguments = {"network": "short", "kinds": kinds, "rate": rate, "flags": ["--short"]}
        row = {"error": problem} if problem else record.part(options, arguments, seconds=options.seconds, **variables)
    sheet.add("neighbours", row if problem else {**row, "rate": rate})
    sheet.finish()


def main() -> None:
    made = record.parser(__doc__, seconds=300, networks="vgg16", quick_seconds=20)
    made.add_argument("--short", action="store_true", help="short iterations and a slow disk that all share")
    made.add_argument("--rate", type=float, help="MB/s of that disk (default: 1000 on CUDA, 300 on the CPU)")
    made.add_argument("--server-network", choices=list(NETWORKS), default="resnet50", help="on the small server")
    options = record.parse(made)
    if options.part:
        arguments = json.loads(options.part)
        try:
            run = small_server if arguments.get("server") else measure
            record.answer(arguments, run(options, arguments))
        except Missing as error:
            record.answer(arguments, {"error": str(error)})
        return
    name = f"interference-short-{options.device}" if options.short else "interference"
    sheet = record.Record(name, options, markdown=markdown, draw=draw)
    if options.draw:
        sheet.redraw()
        return
    if options.short:
        measure_short(options, sheet)
        return
    until = time.time() + options.seconds
    kinds = ["disk", "cpu", *(["gpu"] if options.device == "cuda" else [])]
    share = 0.8 * options.seconds
    sheet.add("neighbours", record.part(options, {"network": options.networks[0], "kinds": kinds}, seconds=share))
    with record.scratch(options) as folder:
        variables, problem = slow_disk(folder, SERVER_RATE)
        arguments = {"network": options.server_network, "server": True}
        left = max(until - time.time(), 10.0)
        row = {"error": problem} if problem else record.part(options, arguments, seconds=left, **variables)
    sheet.add(SERVER, row)
    sheet.finish()


if __name__ == "__main__":
    main()
