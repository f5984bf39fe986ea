"""(d) Neighbours on the disk, on all cores and on the GPU, with and without adaptation; and a small, slow server.

    python benchmarks/checkfreq/interference.py --out build/checkfreq [--quick]

In one process three times the same timeline (before; a neighbour comes, goes; the next one comes, goes): without
checkpoints, with `Auto()`, and with the interval that Auto had before, fixed. Overhead of each phase is against the
same phase without checkpoints, so that what the neighbour itself costs is on neither side. "late" is a phase's second
half: what is left when the policy had time to react.

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
from loop import Loop, Segment, spans, warm
from neighbours import Neighbours
from networks import NETWORKS, Missing, build
from record import percent, secs
from trail import Trail

import stepwell

RUNS = ("without", "adaptive", "fixed")
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
    neighbours = {kind: Neighbours(kind, folder, quick=options.quick) for kind in kinds}
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
    if name == "without":
        segments = run_phases(loop, phases, neighbours, lambda: None)
        return figures(loop, segments, None, 0)
    policy: Any = stepwell.Auto()
    if name == "fixed":
        policy = stepwell.Every(seconds=found["runs"]["adaptive"]["interval_before"] or 1.0)
    tracked, first = {"model": loop.work.model, "optimizer": loop.work.optimizer}, len(loop.marks)
    with stepwell.Checkpointer(folder, policy=policy, grace=None, **tracked) as ckpt:
        loop.run(count=3, after=ckpt.step)
        ckpt.save().wait(300)  # memory is ready
        segments = run_phases(loop, phases, neighbours, ckpt.step)
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
    return found


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


def slow_disk(folder: Path) -> tuple[dict[str, str], str]:
    """The variables that make writing slow, or why there are none."""
    library = folder / "slow_disk.so"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return {}, "no slow disk: there is no C compiler to build slow_disk.c with; left out"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(record.HERE / "slow_disk.c"), "-ldl"]
    done = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, f"no slow disk: {' '.join(done.stderr.split())[:200]}; left out"
    return {"LD_PRELOAD": str(library), "STEPWELL_BENCH_DISK_RATE": str(int(SERVER_RATE))}, ""


# -- results ----------------------------------------------------------------------------------------------------------


def compare(row: dict[str, Any], run: str, phase: str, which: str) -> float | None:
    if run not in row["runs"]:
        return None
    return row["runs"][run]["phases"][phase][which] / row["runs"]["without"]["phases"][phase][which] - 1


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
                f"{record.label(row['network'])}, batch {row['batch']}, {row['state_bytes'] / 1e6:.0f} MB of state.\n\n"
            )
            text += record.table(*neighbour_table(row)) + "\n"
    return text


def neighbour_table(row: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    lines = []
    base = row["runs"]["without"]["phases"]
    for phase in base:
        slower = base[phase]["mean"] / base["before"]["mean"]
        cells = [phase, f"{slower:.2f}x"]
        for run in ("fixed", "adaptive"):
            cells += [percent(compare(row, run, phase, "mean")), percent(compare(row, run, phase, "late"))]
        facts = row["runs"].get("adaptive", {}).get("phases", {}).get(phase, {})
        raised = facts.get("raised_after")
        cells += [secs(facts.get("chosen")), secs(facts.get("highest")), "-" if raised is None else str(raised)]
        lines.append([*cells, secs(facts.get("spacing")), str(facts.get("checkpoints", "-"))])
    head = ["phase", "iteration, no checkpoints", "fixed: overhead", "late", "adaptive: overhead", "late"]
    head += ["interval at its end s", "highest s", "raised after checkpoints", "spacing s", "checkpoints"]
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
    for shift, run in enumerate(run for run in ("fixed", "adaptive") if run in row["runs"]):
        values = [100 * (compare(row, run, name, "mean") or 0.0) for name in names]
        below.bar([at + 0.4 * (shift - 0.5) for at in range(len(names))], values, 0.38, label=run)
    below.axhline(3.5, color="black", linestyle="--", linewidth=1)
    below.set_xticks(range(len(names)), names)
    below.set(ylabel="overhead, %")
    below.grid(axis="y", alpha=0.3)
    below.legend()
    figure.tight_layout()


def main() -> None:
    made = record.parser(__doc__, seconds=300, networks="vgg16", quick_seconds=20)
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
    sheet = record.Record("interference", options, markdown=markdown, draw=draw)
    if options.draw:
        sheet.redraw()
        return
    until = time.time() + options.seconds
    kinds = ["disk", "cpu", *(["gpu"] if options.device == "cuda" else [])]
    share = 0.8 * options.seconds
    sheet.add("neighbours", record.part(options, {"network": options.networks[0], "kinds": kinds}, seconds=share))
    with record.scratch(options) as folder:
        variables, problem = slow_disk(folder)
        arguments = {"network": options.server_network, "server": True}
        left = max(until - time.time(), 10.0)
        row = {"error": problem} if problem else record.part(options, arguments, seconds=left, **variables)
    sheet.add(SERVER, row)
    sheet.finish()


if __name__ == "__main__":
    main()
