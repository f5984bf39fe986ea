"""(e) Goodput against the interval, by simulation and by real failures, with the policy's choice marked.

    python benchmarks/checkfreq/goodput.py --out build/checkfreq [--quick] [--mtbf SECONDS] [--network NAME]

Goodput: work that was kept x the time it takes without checkpoints and failures / time that passed.

Real: a training process is killed (SIGKILL) at moments drawn from an exponential distribution and started again at
once, trainer alone or, every other time, its agent with it; the same moments for every interval. The new process
is forked from one that has imported torch, so that restarts are short and failures can be many. The machine's own
costs (what a checkpoint takes, until it is durable, a restart) are then put into the simulator for the curve beside.
Simulated: the tests' simulator for two larger cases, exponential and Weibull (shape 0.7) failures.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from typing import Any

import record
from loop import Loop, spans
from networks import Missing, build
from record import percent, secs
from trail import Trail
from trainer import FIRST, Lives, Warm

sys.path.append(str(record.REPOSITORY))  # the simulator is the tests'

from stepwell.training.policy.interval import Costs, choose
from tests.training.policy.simulator import Failures, goodput

CASES = {
    "a run of one node: C 0.2 s, durable 4 s, restart 60 s, MTBF 1 h": Costs(0.2, 4.0, 60.0, 3600.0),
    "a large state: C 2 s, durable 60 s, restart 180 s, MTBF 3 h": Costs(2.0, 60.0, 180.0, 10_800.0),
}
BOUND = 0.035


def failures(kind: str, mtbf: float) -> Failures:
    if kind == "exponential":
        return lambda dice: dice.expovariate(1 / mtbf)
    return lambda dice: dice.weibullvariate(mtbf / math.gamma(1 + 1 / 0.7), 0.7)


def simulate(costs: Costs, kind: str, *, lives: int) -> dict[str, Any]:
    """The curve, its best point, and the policy's."""
    assert costs.mtbf is not None
    draw = failures(kind, costs.mtbf)
    chosen = choose(costs, overhead=BOUND)
    tried = [chosen.seconds * 2 ** (n / 3) for n in range(-15, 16)]
    curve = [[value, goodput(value, costs, draw, lives=lives, seed=1)] for value in tried]
    best = max(curve, key=lambda point: point[1])
    at_choice = goodput(chosen.seconds, costs, draw, lives=lives, seed=1)
    facts = {"kind": kind, "curve": curve, "best": best, "chosen": [chosen.seconds, at_choice], "term": chosen.term}
    return {**facts, "behind": best[1] - at_choice}


def clean_iteration(options: Any, network: str) -> float:
    """Seconds, without checkpoints."""
    loop = Loop(build(network, device=options.device, quick=options.quick, precision=options.precision))
    loop.run(count=5)
    segment = loop.run(seconds=1 if options.quick else 4)
    return statistics.median(spans(segment, loop.lengths()))


def real(
    options: Any, network: str, clean: float, *, every: float | None, seconds: float, source: Warm
) -> dict[str, Any]:
    """One run with failures, for so many seconds."""
    dice = random.Random(options.seed)
    with record.scratch(options) as folder:
        policy = {"every_seconds": every} if every else {"mtbf": options.mtbf}
        what = {"network": network, "device": options.device, "quick": options.quick, "precision": options.precision}
        lives = Lives(folder, source=source, **what, **policy)
        started, kills, restarts = time.time(), 0, []
        until = started + seconds
        try:
            while time.time() < until:
                pid = lives.start()
                end = min(until, time.time() + dice.expovariate(1 / options.mtbf))
                while time.time() < end and lives.is_alive():
                    time.sleep(0.005)
                if not lives.is_alive():
                    return {"error": f"the trainer ended: {lives.error()}"}
                if time.time() >= until:
                    break
                lives.kill(agent=kills % 2 == 1)
                kills += 1
                reached = lives.notes.of(pid)
                if FIRST in reached:
                    restarts.append(reached[FIRST]["time"] - lives.started)
            wall = time.time() - started
        finally:
            lives.kill(agent=True)
        trail = Trail(lives.run)
    step = max((event["step"] for event in trail.of("commit")), default=0)  # as the simulator counts: what is durable
    found: dict[str, Any] = {
        "every": every,
        "steps": step,
        "wall": wall,
        "kills": kills,
        "goodput": step * clean / wall,
    }
    decisions = trail.decisions()
    if decisions:
        last = decisions[-1]
        found["chosen"] = last["seconds"]
        found["checkpoint"], found["durable"] = last["checkpoint_seconds"], last["durable_seconds"]
    found["restart"] = statistics.median(restarts) if restarts else None
    found["redone"] = sum(event["redone"] or 0 for event in trail.of("restore"))
    return found


def run_real(options: Any, sheet: record.Record, until: float) -> None:
    """The automatic interval first; the fixed ones lie around what it chose."""
    network = options.networks[0]
    clean = record.part(options, {"network": network}, seconds=30)
    if "error" in clean:
        sheet.add("real", clean)
        return
    factors = (1 / 8, 8) if options.quick else (1 / 16, 1 / 4, 4, 16)
    row: dict[str, Any] = {"network": network, "mtbf": options.mtbf, "clean": clean["clean"], "runs": []}
    base = 1.0
    with record.scratch(options) as folder, Warm(folder / "nursery.log") as source:
        each = max((until - time.time()) / (len(factors) + 1), 5.0)
        for factor in (None, *factors):
            every = None if factor is None else base * factor
            found = real(options, network, clean["clean"], every=every, seconds=each, source=source)
            if factor is None:
                base = max(found.get("chosen", 1.0), 0.02)
            row["runs"].append(found)
            done = found.get("error") or f"goodput {found['goodput']:.3f}, {found['kills']} kills"
            print(f"real, interval {every or 'automatic'}: {done}", file=sys.stderr, flush=True)
            _add_curve(row)
            sheet.add("real", row)


def _add_curve(row: dict[str, Any]) -> None:
    auto = row["runs"][0]
    if "checkpoint" in auto and auto["restart"] is not None:
        costs = Costs(max(auto["checkpoint"], 1e-5), auto["durable"], auto["restart"], row["mtbf"])
        row["simulated"] = simulate(costs, "exponential", lives=4000)


def markdown(result: dict[str, Any]) -> str:
    text = "# Goodput against the interval\n\n## Simulated\n\n"
    lines = []
    for key, row in result["rows"].items():
        for found in row.get("curves", []):
            best, chosen = found["best"], found["chosen"]
            cells = [key, found["kind"], secs(best[0]), percent(best[1]), f"{secs(chosen[0])} ({found['term']})"]
            lines.append([*cells, percent(chosen[1]), f"{100 * found['behind']:.2f}"])
    head = ["case", "failures", "best interval s", "its goodput", "policy's interval s (term)", "its goodput"]
    text += record.table([*head, "points behind"], lines)
    real_row = result["rows"].get("real")
    if real_row is None:
        return text
    text += "\n## Real failures\n\n"
    if "error" in real_row:
        return f"{text}{real_row['error']}\n"
    text += (
        f"{record.label(real_row['network'])}, SIGKILLs with a mean of {real_row['mtbf']:g} s between them, clean"
        f" iteration {1e3 * real_row['clean']:.1f} ms.\n\n"
    )
    lines = []
    for found in real_row["runs"]:
        if "error" in found:
            lines.append([secs(found.get("every")), found["error"], *[""] * 5])
            continue
        every = f"automatic: {secs(found.get('chosen'))}" if found["every"] is None else secs(found["every"])
        cells = [every, f"{found['wall']:.0f}", str(found["kills"]), str(found["steps"]), str(found["redone"])]
        lines.append([*cells, secs(found["restart"]), percent(found["goodput"])])
    head = ["interval s", "wall s", "kills", "steps kept", "steps redone", "restart s (median)", "goodput"]
    return text + record.table(head, lines)


def draw(result: dict[str, Any], pyplot: Any) -> None:
    rows = {key: row for key, row in result["rows"].items() if row.get("curves") or row.get("simulated")}
    figure, axes = pyplot.subplots(1, max(1, len(rows)), figsize=(5.5 * max(1, len(rows)), 4.5), squeeze=False)
    for axis, (key, row) in zip(axes[0], rows.items(), strict=False):
        for found in row.get("curves", [row.get("simulated")]):
            axis.plot(*zip(*found["curve"], strict=True), label=f"simulated, {found['kind']}")
            axis.plot(*found["chosen"], "k*", markersize=12)
        runs = [run for run in row.get("runs", []) if "error" not in run]
        fixed = [(run["every"], run["goodput"]) for run in runs if run["every"]]
        if fixed:
            axis.plot(*zip(*fixed, strict=True), "o", label="real, fixed")
        for run in runs:
            if run["every"] is None and "chosen" in run:
                axis.plot(run["chosen"], run["goodput"], "r*", markersize=14, label="real, automatic")
        axis.set(xscale="log", xlabel="interval, s (star: the policy's)", ylabel="goodput", title=key.split(":")[0])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()


def main() -> None:
    made = record.parser(__doc__, seconds=240, networks="resnet18", quick_seconds=32)
    made.add_argument("--mtbf", type=float, help="seconds between real failures (default: an eighth of a run's time)")
    made.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    made.add_argument("--no-real", action="store_true", help="only the simulation")
    options = record.parse(made)
    if options.part:
        arguments = json.loads(options.part)
        try:
            record.answer(arguments, {"clean": clean_iteration(options, arguments["network"])})
        except Missing as error:
            record.answer(arguments, {"error": str(error)})
        return
    sheet = record.Record("goodput", options, markdown=markdown, draw=draw)
    if options.draw:
        sheet.redraw()
        return
    until = time.time() + options.seconds
    options.mtbf = options.mtbf or max(2.0, options.seconds / 5 / 8)
    for name, costs in CASES.items():
        kinds = ("exponential", "Weibull")
        sheet.add(name, {"curves": [simulate(costs, kind, lives=500 if options.quick else 20_000) for kind in kinds]})
    if not options.no_real:
        run_real(options, sheet, until)
    sheet.finish()


if __name__ == "__main__":
    main()
