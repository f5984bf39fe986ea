"""(f) A lossy durable checkpoint at every iteration of a real run, what it costs, and what a kill of everything loses.

Rounds of the same training without stepwell, with exact bases alone, and with a record after every step, in turn. Then
trainer and agent are killed at random iterations, the run goes on from the newest record, and its loss is compared with
that of the uninterrupted one on the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import rows, save, wait_while_quiet

TRAINER = Path(__file__).with_name("live_trainer.py")
WARM = 8
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


def rounds(count: int, folder: Path, passed: list[str], steps: int, deltas: str, seconds: float) -> dict[str, Any]:
    """Each arm in turn, so that all meet the same machine."""
    arms = {
        "plain": {},
        "bases": {"deltas": "", "base_seconds": seconds},
        "deltas": {"deltas": deltas, "base_seconds": seconds},
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    facts: list[dict[str, Any]] = []
    for number in range(count):
        for name, options in arms.items():
            wait_while_quiet()
            run, log = folder / f"{name}.{number}", folder / f"{name}.{number}.log"
            place = {} if name == "plain" else {"run": run}
            subprocess.run(command(log, passed, steps=steps, **place, **options), check=True)
            times[name].append(statistics.fmean(line[1] for line in read(log)[WARM:]))
            if name == "deltas":
                facts.append(look_at(run, read(log)))
    return {"times": times, "records": facts}


def look_at(run: Path, lines: list[Line]) -> dict[str, Any]:
    records = events(run, "delta")
    first = records[0]["step"] if records else 0
    durable = {event["step"] for event in records} | {event["step"] for event in events(run, "commit")}
    asked = [step for step, *_ in lines if step > first]
    state = events(run, "snapshot")[0]["nbytes"]
    return {
        "steps": len(asked),
        "durable": sum(step in durable for step in asked),
        "behind": statistics.fmean(step - reached for step, _, _, reached in lines if step > first),
        "bytes": statistics.fmean(event["nbytes"] for event in records),
        "state": state,
        "seconds": statistics.fmean(event["seconds"] for event in records),
        "error": statistics.fmean(event["error"] for event in records[16:] or records),
        "bases": len(events(run, "commit")),
    }


def kill(number: int, folder: Path, passed: list[str], steps: int, deltas: str, truth: dict[int, float]) -> dict:
    """Everything dies at a random iteration; the run goes on from the newest record to the end."""
    run, log = folder / f"kill.{number}", folder / f"kill.{number}.log"
    given = {"run": run, "deltas": deltas, "base_seconds": 0, "steps": steps}
    process = subprocess.Popen(command(log, passed, **given), start_new_session=True)
    at = random.Random(number).randint(steps // 4, steps // 2)
    while not log.exists() or not (lines := read(log)) or lines[-1][0] < at or not lines[-1][3]:
        time.sleep(0.01)  # until then, and until something is durable
        assert process.poll() is None
    agent = events(run, "start")[0]["agent_pid"]
    os.kill(agent, signal.SIGKILL)
    process.kill()
    process.wait()
    done = read(log)[-1][0]
    subprocess.run(command(folder / f"again.{number}.log", passed, prefer="newest", **given), check=True)
    after = read(folder / f"again.{number}.log")
    restored = events(run, "restore")[0]
    differences = {step: loss - truth[step] for step, _, loss, _ in after if step in truth}
    return {
        "killed": done,
        "restored": restored["step"],
        "source": restored["source"],
        "lost": done - restored["step"],
        "first": differences[min(differences)],
        "last": statistics.fmean(list(differences.values())[-10:]),
        "losses": [[step, loss] for step, _, loss, _ in after],
    }


def table(found: dict[str, Any]) -> str:
    times = found["rounds"]["times"]
    plain = statistics.fmean(times["plain"])
    lines = [
        [name, f"{1000 * statistics.fmean(each):.1f}", f"{100 * (statistics.fmean(each) / plain - 1):+.1f} %",
         " ".join(f"{1000 * value:.1f}" for value in each)]
        for name, each in times.items()
    ]  # fmt: skip
    text = rows(["arm", "ms an iteration", "against plain", "rounds"], lines)
    records = found["rounds"]["records"]
    text += "\n" + rows(
        ["round", "steps durable", "behind (steps)", "record", "of the state", "coding and writing", "error", "bases"],
        [
            [n, f"{r['durable']} of {r['steps']}", f"{r['behind']:.2f}", f"{r['bytes'] / 1e6:.2f} MB",
             f"{r['bytes'] / r['state']:.1%}", f"{1000 * r['seconds']:.0f} ms", f"{r['error']:.3f}", r["bases"]]
            for n, r in enumerate(records)
        ],
    )  # fmt: skip
    heads = ["killed after", "restored", "from", "steps lost", "loss against truth, first step", "mean of the last 10"]
    return text + "\n" + rows(
        heads,
        [
            [k["killed"], k["restored"], k["source"], k["lost"], f"{k['first']:+.4f}", f"{k['last']:+.4f}"]
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
    parser.add_argument("--base-seconds", type=float, default=20.0)
    parser.add_argument("--deltas", default="lc(bits=3)")
    options, passed = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        folder, given = Path(place), (options.steps, options.deltas)
        found: dict[str, Any] = {"rounds": rounds(options.rounds, folder, passed, *given, options.base_seconds)}
        truth_log = folder / "truth.log"  # with stepwell's order of the data, uninterrupted
        whole = {"run": folder / "truth", "base_seconds": 0, "steps": options.steps}
        subprocess.run(command(truth_log, passed, **whole), check=True)
        truth = {step: loss for step, _, loss, _ in read(truth_log)}
        found["truth"] = [[step, loss] for step, loss in truth.items()]
        found["kills"] = [kill(number, folder, passed, *given, truth) for number in range(options.kills)]

    def draw(pyplot: Any) -> None:
        pyplot.figure(figsize=(7, 4))
        pyplot.plot(*zip(*found["truth"], strict=True), color="black", label="uninterrupted")
        for number, each in enumerate(found["kills"]):
            pyplot.plot(*zip(*each["losses"], strict=True), label=f"killed after {each['killed']}", alpha=0.8)
            pyplot.axvline(each["killed"], color=f"C{number}", linestyle=":")
        pyplot.xlabel("iteration")
        pyplot.ylabel("loss")
        pyplot.legend()

    title = "A record after every iteration"
    save(options.name, title, found, table(found), draw, options.out, threads="training uses all of them")
    print(table(found))


if __name__ == "__main__":
    main()
