"""All experiments, one after the other, within a given time.

    python benchmarks/checkfreq/run_all.py --out build/checkfreq [--deadline SECONDS] [--only a,b] [--quick]

Every experiment gets its share of what is left, and is ended when it takes a minute longer; what it had written by
then stays. `summary.md` and `summary.json` are written anew after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXPERIMENTS = {"stall": 150, "strategies": 150, "overhead": 540, "recovery": 360, "interference": 300, "goodput": 240}
"""Seconds by default; with another --deadline they shrink or grow together."""
QUICK_SECONDS = 45
OVER = 60.0


def run(name: str, options: argparse.Namespace, seconds: float, passed: list[str]) -> dict[str, Any]:
    """One experiment in a process of its own."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(options.out), "--seconds", f"{seconds:.0f}"]
    command += [*(["--quick"] if options.quick else []), *passed]
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status: int | str = process.wait(seconds + OVER)
    except subprocess.TimeoutExpired:
        status = "ended: it took too long"
        process.send_signal(signal.SIGINT)  # it ends its parts, and writes what they had found
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {"seconds": round(time.monotonic() - started, 1), "allowed": round(seconds, 1), "status": status}


def write(options: argparse.Namespace, done: dict[str, Any]) -> None:
    (options.out / "summary.json").write_text(json.dumps(done, indent=1) + "\n")
    text = ""
    for name, facts in done.items():
        sheet = options.out / f"{name}.md"
        text += sheet.read_text() if sheet.exists() else f"# {name}\n\nno result: {facts['status']}\n"
        text += f"\n{name}: {facts['seconds']} s, status {facts['status']}\n\n"
    (options.out / "summary.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, help="seconds for everything")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)}, with commas")
    parser.add_argument("--quick", action="store_true")
    options, passed = parser.parse_known_args()  # what is left goes to every experiment
    names = options.only.split(",")
    if unknown := set(names) - EXPERIMENTS.keys():
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    usual = {name: float(QUICK_SECONDS if options.quick else EXPERIMENTS[name]) for name in names}
    until = time.monotonic() + (options.deadline or sum(usual.values()))
    options.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    for at, name in enumerate(names):
        seconds = (until - time.monotonic()) * usual[name] / sum(usual[other] for other in names[at:])
        if seconds < 5:
            done[name] = {"seconds": 0, "allowed": 0, "status": "no time was left"}
        else:
            print(f"== {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
            done[name] = run(name, options, seconds, passed)
        write(options, done)
    print(f"in {options.out}: summary.md, and a table, JSON and picture for each", file=sys.stderr)


if __name__ == "__main__":
    main()
