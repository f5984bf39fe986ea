"""(f) A lossy durable checkpoint at every iteration of a real run, what it costs, and what a kill of everything loses.

Rounds of the same training without stepwell, with exact bases alone, and with a record after every step (counted from
the first record on), in turn. Then trainer and agent are killed at random iterations, the run goes on from the newest
record, and its loss is compared with that of the uninterrupted one with records, on the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import rows, save, wait_while_quiet

TRAINER = Path(__file__).with_name("live_trainer.py")
WARM = 8
AROUND = 60
"""So many iterations after a base's step what it costs is over: it is copied, written, and the next chain begun."""
Line = tuple[int, float, float, int]


def command(log: Path, passed: list[str], **options: object) -> list[str]:
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, str(TRAINER), "--log", str(log), *given, *passed]


def read(log: Path) -> list[Line]:
    lines = [line.split() for line in log.read_text().splitlines() if line.count(" ") == 3]
    return [(int(step), float(seconds), float(loss), int(reached)) for step, seconds, loss, reached in lines]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line.endswith("}")]
    return [event for event in lines if event["kind"] == kind]


def rounds(folder: Path, passed: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each arm in turn, so that all meet the same machine. Gives all that is known, after each arm."""
    base, fewer = {"base_seconds": options.base_seconds}, {"steps": options.plain_steps or options.steps}
    known = {
        "plain": fewer,
        "idle": {**fewer, "base_seconds": 0},
        "bases": {**fewer, **base},
        "deltas": {"steps": options.steps, "deltas": options.deltas, **base},
    }
    arms = {name: known[name] for name in options.arms.split(",")}
    times: dict[str, list[float]] = {name: [] for name in arms}
    each: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    truth: list[list[float]] = []
    for number in range(options.rounds):
        for name, given in arms.items():
            wait_while_quiet()
            run, log = folder / f"{name}.{number}", folder / f"{name}.{number}.log"
            place = {} if name == "plain" else {"run": run}
            subprocess.run(command(log, passed, **place, **given), check=True)
            lines, first = read(log), 0
            if name == "deltas":
                facts.append(look_at(run, lines))
                first, truth = facts[-1]["first"], truth or [[step, loss] for step, _, loss, _ in lines]
            times[name].append(statistics.fmean(line[1] for line in lines if line[0] > max(first, WARM)))
            each.append({"arm": name, "milliseconds": [round(1000 * seconds, 2) for _, seconds, *_ in lines]})
            yield {"rounds": {"times": times, "records": facts, "iterations": each}, "truth": truth, "kills": []}
            shutil.rmtree(run, ignore_errors=True)


def look_at(run: Path, lines: list[Line]) -> dict[str, Any]:
    """From the first record on."""
    records = events(run, "delta")
    first = records[0]["step"] if records else 0
    durable = {event["step"] for event in records} | {event["step"] for event in events(run, "commit")}
    asked = [step for step, *_ in lines if step > first]
    state = max(event["nbytes"] for event in events(run, "snapshot"))
    commits = [event["step"] for event in events(run, "commit")]
    usual = statistics.median(seconds for step, seconds, *_ in lines if step > first)
    beyond = {step: seconds - usual for step, seconds, *_ in lines}
    return {
        "first": first,
        "steps": len(asked),
        "durable": sum(step in durable for step in asked),
        "behind": statistics.fmean(step - reached for step, _, _, reached in lines if step > first),
        "bytes": statistics.fmean(event["nbytes"] for event in records),
        "state": state,
        "seconds": statistics.fmean(event["seconds"] for event in records),
        "write_seconds": statistics.fmean(event["write_seconds"] for event in records),
        "error": statistics.fmean(event["error"] for event in records[16:] or records),
        "bases": len(commits),
        "base_steps": commits,
        "base_costs": [sum(beyond.get(step + n, 0) for n in range(-1, AROUND)) for step in commits if step > first],
        "skipped": dict(Counter(e["reason"] for e in events(run, "delta-skipped") if e["step"] > first)),
        "coding": [f"{event['where']}: {event['reason']}" for event in events(run, "coding")],
        "ended": [event["reason"] for event in events(run, "chain-ended")],
    }


def kill(number: int, folder: Path, passed: list[str], options: argparse.Namespace, truth: dict[int, float]) -> dict:
    """Everything dies at a random iteration; the run goes on from the newest record to the end."""
    run, log = folder / f"kill.{number}", folder / f"kill.{number}.log"
    given = {"run": run, "deltas": options.deltas, "base_seconds": 0}
    process = subprocess.Popen(command(log, [*passed, "--sync"], steps=10**6, **given), start_new_session=True)
    more = random.Random(number).randint(options.steps // 8, options.steps // 4)
    while not log.exists() or not (lines := read(log)) or not (found := records(run)) or lines[-1][0] < found[0] + more:
        time.sleep(0.05)
        assert process.poll() is None
    agent = events(run, "start")[0]["agent_pid"]
    os.kill(agent, signal.SIGKILL)
    process.kill()
    process.wait()
    lines, started = read(log), time.monotonic()
    done = lines[-1][0]
    again = folder / f"again.{number}.log"
    steps = done + options.after
    subprocess.run(command(again, [*passed, "--sync"], prefer="newest", steps=steps, **given), check=True)
    after, restored = read(again), events(run, "restore")[0]
    if steps not in truth:  # the arm with records was shorter
        longer, place = folder / f"truth.{number}.log", folder / f"truth.{number}"
        subprocess.run(command(longer, passed, run=place, base_seconds=0, steps=steps), check=True)
        truth = {step: loss for step, _, loss, _ in read(longer)}
    differences = {step: loss - truth[step] for step, _, loss, _ in after if step in truth}
    usual = [loss - truth[step] for step, _, loss, _ in lines[-20:] if step in truth]
    shutil.rmtree(run, ignore_errors=True)
    return {
        "killed": done,
        "restored": restored["step"],
        "source": restored["source"],
        "restore": restored.get("seconds"),
        "lost": done - restored["step"],
        "before": statistics.fmean(map(abs, usual)),
        "first": differences[min(differences)],
        "last": statistics.fmean(list(differences.values())[-10:]),
        "seconds": time.monotonic() - started,
        "losses": [[step, loss] for step, _, loss, _ in after],
        "truth": [[step, loss] for step, loss in sorted(truth.items())],
    }


def records(run: Path) -> list[int]:
    """Steps of the records so far."""
    return [event["step"] for event in events(run, "delta")] if (run / "events.jsonl").exists() else []


def table(found: dict[str, Any]) -> str:
    times = found["rounds"]["times"]
    plain = statistics.fmean(times["plain"]) if times else 1.0
    lines = [
        [name, f"{1000 * statistics.fmean(each):.1f}", f"{100 * (statistics.fmean(each) / plain - 1):+.2f} %",
         " ".join(f"{1000 * value:.1f}" for value in each)]
        for name, each in times.items()
        if each
    ]  # fmt: skip
    text = rows(["arm", "ms an iteration", "against plain", "rounds"], lines)
    records = found["rounds"]["records"]
    text += "\n" + rows(
        ["round", "steps durable", "behind (steps)", "record", "of the state", "coding and writing", "writing", "error",
         "bases", "each costs training"],
        [
            [n, f"{r['durable']} of {r['steps']}", f"{r['behind']:.2f}", f"{r['bytes'] / 1e6:.2f} MB",
             f"{r['bytes'] / r['state']:.1%}", f"{1000 * r['seconds']:.0f} ms",
             f"{1000 * r['write_seconds']:.0f} ms", f"{r['error']:.3f}", r["bases"],
             " ".join(f"{1000 * cost:.0f}" for cost in r["base_costs"]) + " ms"]
            for n, r in enumerate(records)
        ],
    )  # fmt: skip
    heads = ["killed after", "restored", "from", "steps lost", "restore s", "loss against truth, 20 before (absolute)",
             "first step", "mean of the last 10"]  # fmt: skip
    return text + "\n" + rows(
        heads,
        [
            [k["killed"], k["restored"], k["source"], k["lost"], f"{k['restore']:.1f}", f"{k['before']:.4f}",
             f"{k['first']:+.4f}", f"{k['last']:+.4f}"]
            for k in found["kills"]
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="live")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--arms", default="plain,bases,deltas", help="plain first; idle: with stepwell, nothing saved")
    parser.add_argument("--plain-steps", type=int, default=0, help="of the arms without records, unless as many")
    parser.add_argument("--after", type=int, default=30, help="steps after the one that a kill came after")
    parser.add_argument("--base-seconds", type=float, default=20.0)
    parser.add_argument("--deltas", default="lc(bits=3)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--scratch", type=Path, default=None, help="where runs are written")
    options, passed = parser.parse_known_args()
    passed += ["--device", options.device]
    nothing = {"times": {}, "records": [], "iterations": []}
    found: dict[str, Any] = {"rounds": nothing, "truth": [], "kills": []}
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        for found in rounds(Path(place), passed, options):
            store(found, options)
        for number in range(options.kills):
            truth = {int(step): loss for step, loss in found["truth"]}
            done = kill(number, Path(place), passed, options, truth)
            found["kills"].append(done)
            found["truth"] = max(found["truth"], done.pop("truth"), key=len)
            store(found, options)


def store(found: dict[str, Any], options: argparse.Namespace) -> None:
    """What is known so far."""

    def draw(pyplot: Any) -> None:
        pyplot.figure(figsize=(7, 4))
        if found["truth"]:
            pyplot.plot(*zip(*found["truth"], strict=True), color="black", label="uninterrupted")
        for number, each in enumerate(found["kills"]):
            pyplot.plot(*zip(*each["losses"], strict=True), label=f"killed after {each['killed']}", alpha=0.8)
            pyplot.axvline(each["killed"], color=f"C{number}", linestyle=":")
        pyplot.xlabel("iteration")
        pyplot.ylabel("loss")
        pyplot.legend()

    title = "A record after every iteration"
    save(options.name, title, found, table(found), draw, options.out, options.device, "training may use all of them")
    print(table(found), flush=True)


if __name__ == "__main__":
    main()
