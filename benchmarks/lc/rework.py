"""(a) What a lossy checkpoint costs: iterations until a restored run has the loss back that it had at the failure.

Protocol: one uninterrupted run for each seed; every scheme follows its trajectory from the same exact base with the
same number of checkpoints; the whole model is lost at a failure, restored, and goes on with the batches that the
uninterrupted run had. Rework: the first k with loss(T + k) <= loss(T) over a fixed part of the data, at most `cap`.
Beside it: the loss right after the restore, the distance to the true state relative to the way from the base, and the
loss 100 iterations on against the uninterrupted run: rework alone flatters states that lag, and so average.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from report import interval, rows, save, wait_while_quiet
from schemes import _flat, lose, run
from workloads import KINDS, State, Workload

SCHEMES = (
    "lc(bits=2,scope=global)", "lc(bits=2)", "lc(bits=3,scope=global)", "lc(bits=3)", "ternary", "uniform(step=1.5)",
    "uniform(step=1)", "uniform(step=0.5)", "SCAR 2.5", "SCAR 5", "SCAR 10", "TOPN 2.5", "TOPN 5", "TOPN 10",
)  # fmt: skip
LOOK_AHEAD = 100
PARTIAL = ", lost "
"""In the name of a scheme, before the part of the model that was lost; without it, all of it."""


def trial(work: Workload, states: list[State], failure: int, optimizer: dict, scheme: str, truth: dict,
          lost: float) -> dict:  # fmt: skip
    """Restore what is lost with one scheme and follow the run."""
    wait_while_quiet()
    outcome = run(scheme, states)
    restored = outcome.state if lost == 1 else lose(states[-1], outcome.state, lost, failure)
    way = float(np.linalg.norm(_flat(states[-1]) - _flat(states[0])))
    missing = float(np.linalg.norm(_flat(restored) - _flat(states[-1])))
    work.load(restored, copy.deepcopy(optimizer))
    first, target, rework = work.loss(), truth["loss"], None
    rework = 0 if first <= target else None
    kind = work.kind
    ahead = first
    for k in range(1, max(kind.cap, LOOK_AHEAD) + 1):
        if rework is not None and k > LOOK_AHEAD:
            break
        work.step(failure + k)
        is_look = rework is None and k <= kind.cap and (k <= 10 or k % kind.every == 0)
        now = work.loss() if is_look or k == LOOK_AHEAD else None
        if is_look and now is not None and now <= target:
            rework = k
        if k == LOOK_AHEAD and now is not None:
            ahead = now
    return {
        "share": outcome.share, "rework": kind.cap if rework is None else rework, "is_capped": rework is None,
        "loss": first, "loss_at_failure": target, "error": missing / way, "difference_ahead": ahead - truth["ahead"],
    }  # fmt: skip


def with_indices(result: dict) -> dict:
    """The same trial, charged for the indices too: half of the entries at the same size."""
    size = float(result["scheme"].split()[1])
    return {**result, "scheme": f"TOPN+index {2 * size:g}", "share": 2 * result["share"]}


def follow(name: str, folder: Path, seeds: list[int], schemes: tuple[str, ...], parts: list[float]) -> list[dict]:
    """All trials of one workload."""
    kind, found = KINDS[name], []
    for seed in seeds:
        work = Workload(kind, folder, seed)
        states, points = [work.state()], {}
        for iteration in range(1, max(kind.failures) + LOOK_AHEAD + 1):
            work.step(iteration)
            if iteration % kind.interval == 0 and iteration <= max(kind.failures):
                states.append(work.state())
            if iteration in kind.failures:
                optimizer = copy.deepcopy(work.optimizer.state_dict())
                points[iteration] = {"loss": work.loss(), "count": len(states), "optimizer": optimizer}
            if iteration - LOOK_AHEAD in kind.failures:
                points[iteration - LOOK_AHEAD]["ahead"] = work.loss()
            if iteration % 10 == 0:
                wait_while_quiet()
        for failure, point in points.items():
            for scheme, lost in itertools.product(schemes, parts):
                past, label = states[: point["count"]], scheme if lost == 1 else f"{scheme}{PARTIAL}{lost:g}"
                result = trial(work, past, failure, point["optimizer"], scheme, point, lost)
                found.append({"workload": name, "seed": seed, "failure": failure, "scheme": label, **result})
                if label in ("TOPN 2.5", "TOPN 5"):
                    found.append(with_indices(found[-1]))
        print(f"{name} seed {seed}: done", flush=True)
    return found


def summary(trials: list[dict]) -> list[dict]:
    """One row a workload and scheme."""
    found = []
    for name in dict.fromkeys(t["workload"] for t in trials):
        for scheme in dict.fromkeys(t["scheme"] for t in trials if t["workload"] == name):
            own = [t for t in trials if t["workload"] == name and t["scheme"] == scheme]
            rework = [t["rework"] for t in own]
            found.append(
                {
                    "workload": name, "scheme": scheme, "trials": len(own), "cap": KINDS[name].cap,
                    "share": float(np.mean([t["share"] for t in own])), "rework": float(np.mean(rework)),
                    "ci": interval(rework), "most": max(rework), "capped": sum(t["is_capped"] for t in own),
                    "jump": float(np.mean([t["loss"] - t["loss_at_failure"] for t in own])),
                    "error": float(np.mean([t["error"] for t in own])),
                    "ahead": float(np.mean([t["difference_ahead"] for t in own])),
                    "worst_ahead": max(abs(t["difference_ahead"]) for t in own),
                }
            )  # fmt: skip
    return found


def compare(found: list[dict]) -> list[list[object]]:
    """At 5 % and 10 %: the best that fits, of the paper's code and of all of ours, against SCAR and TOPN."""
    lines = []
    for name in dict.fromkeys(row["workload"] for row in found):
        own = {row["scheme"]: row for row in found if row["workload"] == name}
        for limit in (5, 10):
            fits = [row for row in own.values() if "OPN" not in row["scheme"] and "SCAR" not in row["scheme"]]
            fits = [row for row in fits if row["share"] <= limit / 100]
            lc = min(
                (row for row in fits if row["scheme"].startswith("lc")), key=lambda row: row["rework"], default=None
            )
            best = min(fits, key=lambda row: row["rework"], default=None)
            scar, topn, paid = (own[f"{kind} {limit}"] for kind in ("SCAR", "TOPN", "TOPN+index"))
            cells = [name, f"{limit} %"]
            for row in (lc, best):
                cells.append(
                    "none fits" if row is None else f"{row['scheme']} ({row['share']:.1%}): {row['rework']:.1f}"
                )
            for row in (scar, topn, paid):
                mark = ">" if row["capped"] else ""
                cells.append(f"{mark}{row['rework']:.1f} ({beside(row, lc)})")
            lines.append(cells)
    return [*lines, ["the talk", "5 %", "", "", "2.88 to 5.77x", "2.17 to 4.06x", ""],
            ["the talk", "10 %", "", "", "1.9 to 4.82x", "1.52 to 2.17x", ""]]  # fmt: skip


def partial(found: list[dict]) -> list[list[object]]:
    """What SCAR's partial recovery saves: rework with a part of the model lost, against all of it."""
    lines: dict[tuple[str, str], list[dict]] = {}
    for row in found:
        lines.setdefault((row["workload"], row["scheme"].split(PARTIAL)[0]), []).append(row)
    answer: list[list[object]] = []
    for (name, scheme), own in lines.items():
        whole = next((row["rework"] for row in own if PARTIAL not in row["scheme"]), None)
        cells = []
        for row in own:
            less = f" (-{1 - row['rework'] / whole:.0%})" if whole and row["rework"] != whole else ""
            cells.append(f"{[*row['scheme'].split(PARTIAL), '1'][1]}: {row['rework']:.1f}{less}")
        answer.append([name, scheme, "; ".join(cells)])
    return [*answer, ["SCAR's paper", "full checkpoints", "0.25: -59 to -89 %; 0.5: -31 to -62 %; 0.75: -12 to -42 %"]]


def beside(row: dict, lc: dict | None) -> str:
    """How many times the rework of the lc code; a ratio to less than one iteration says nothing."""
    if lc is None:
        return "-"
    if lc["rework"] < 1:
        return f"+{row['rework'] - lc['rework']:.1f} iterations"
    return f"{'>' if row['capped'] else ''}{row['rework'] / lc['rework']:.1f}x"


def draw(found: list[dict], pyplot) -> None:
    names = list(dict.fromkeys(row["workload"] for row in found))
    _, axes = pyplot.subplots(-(-len(names) // 2), 2, figsize=(11, 3.1 * -(-len(names) // 2)), squeeze=False)
    styles = {"lc": ("#1b7837", "o"), "ternary": ("#5aae61", "^"), "uniform": ("#a6dba0", "s"),
              "SCAR": ("#d6604d", "D"), "TOPN": ("#7a8fa6", "v"), "TOPN+index": ("#2166ac", "v")}  # fmt: skip
    for axis, name in zip(axes.flat, names, strict=False):
        own = [row for row in found if row["workload"] == name]
        for kind, (colour, marker) in styles.items():
            line = [row for row in own if row["scheme"].split("(")[0].split(" ")[0] == kind]
            line.sort(key=lambda row: row["share"])
            places, values = [100 * row["share"] for row in line], [row["rework"] for row in line]
            spread = [row["ci"] for row in line]
            axis.errorbar(places, values, spread, color=colour, marker=marker, label=kind, capsize=2, lw=1)
        axis.axhline(own[0]["cap"], color="grey", lw=0.7, ls=":")
        axis.set(title=name, xlabel="size of a checkpoint, % of the parameters", ylabel="rework, iterations")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=-2)
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="rework")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--schemes", default="", help="separated by ;")
    parser.add_argument("--lost", default="1", help="parts of the model that a failure takes, such as 0.25,0.5,0.75,1")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="add the trials of earlier results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    schemes = tuple(options.schemes.split(";")) if options.schemes else SCHEMES
    trials: list[dict] = []
    for path in options.join:
        trials += json.loads(path.read_text())["trials"]
    for name in filter(None, options.only.split(",")):
        seeds, parts = [int(seed) for seed in options.seeds.split(",")], [float(p) for p in options.lost.split(",")]
        trials += follow(name, options.data, seeds, schemes, parts)
        report(trials, options.name, options.out)
    if trials and not options.only:
        report(trials, options.name, options.out)


def report(trials: list[dict], name: str, out: Path) -> None:
    found = summary(trials)
    detail = rows(
        ["workload", "scheme", "size", "rework, mean +- 95 %", "worst", "capped", "error / way", "loss jump",
         "loss at +100"],
        [[r["workload"], r["scheme"], f"{r['share']:.2%}", f"{r['rework']:.1f} +- {r['ci']:.1f}", r["most"],
          f"{r['capped']} of {r['trials']}", f"{r['error']:.3f}", f"{r['jump']:+.4f}",
          f"{r['ahead']:+.4f} (most {r['worst_ahead']:.4f})"] for r in found],
    )  # fmt: skip
    whole = [row for row in found if PARTIAL not in row["scheme"]]
    is_full = all(f"SCAR {limit}" in {row["scheme"] for row in whole} for limit in (5, 10))
    header = ["workload", "size", "best lc that fits", "best of ours", "SCAR", "TOPN, values", "TOPN, with indices"]
    head = rows(header, compare(whole)) if is_full else ""
    if len(whole) < len(found):
        head += "\n" + rows(["workload", "scheme", "rework, by part lost"], partial(found))
    about = (
        "Rework in iterations; in brackets how many times that of the lc code. The seeds and failures are in the JSON."
    )
    text = f"{head}\n{about}\n\n{detail}"
    result = {"trials": trials, "summary": found}
    save(name, "Rework against the size of a checkpoint", result, text, lambda pyplot: draw(whole, pyplot), out)


if __name__ == "__main__":
    main()
