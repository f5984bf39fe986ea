"""stepwell and every peer that is installed, in one run: same training loop, same state, same disk, limits beside.

    python benchmarks/peers.py --size cpu --out build/peers
    python benchmarks/peers.py --size tiny --only stepwell,torch.save --saves 3

Writes results.json, results.md and results.png to --out. `benchmarks/README.md` says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "src"))  # a checkout that is not installed

from peer import figures, limits, picture, report
from peer.conductor import Conductor, Settings
from peer.machine import REPOSITORY, commit, machine
from peer.rows import ROWS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "cpu", "gpu"), default="tiny")
    parser.add_argument("--loop", choices=("gpt", "dispatch"), default="gpt", help="dispatch: a few ms, no computing")
    parser.add_argument("--saves", type=int, default=20, help="timed saves a row")
    parser.add_argument("--budget", type=float, default=180, help="seconds of saving a row; then it stops early")
    parser.add_argument("--own-budget", type=float, help="the same for stepwell (default: 3 x --budget)")
    parser.add_argument("--kills", type=int, default=2, help="SIGKILL tries of asynchronous rows")
    parser.add_argument("--join-restores", action="store_true", help="cold and warm restore in one process")
    parser.add_argument("--every", type=int, default=60, help="iterations with a snapshot at each (stepwell); 0: none")
    parser.add_argument("--only", default="", help=f"rows to run, of {', '.join(ROWS)}")
    parser.add_argument("--skip", default="", help="rows to leave out")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    parser.add_argument("--probe-every", type=int, default=3, help="measure the disk again after so many rows")
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--scratch", type=Path, help="folder on the file system to be measured (default: --out)")
    parser.add_argument("--draw", action="store_true", help="only make table and picture anew from --out/results.json")
    parser.add_argument("--append", action="store_true", help="keep the rows that --out already has")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further row is started")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "peers")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[str]:
    """The rows to run, shuffled. An unknown name ends the run."""
    only, skip = (set(filter(None, text.split(","))) for text in (options.only, options.skip))
    unknown = (only | skip) - ROWS.keys()
    if unknown:
        sys.exit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    names = [name for name in ROWS if (not only or name in only) and name not in skip]
    random.Random(options.seed).shuffle(names)
    return names


class Bar:
    """One line a row, rewritten in a terminal, printed once elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._at, self._name = total, 0, ""
        self._started = self._row_started = time.monotonic()

    def row(self, name: str) -> None:
        self._at, self._name, self._row_started = self._at + 1, name, time.monotonic()

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            seconds = time.monotonic() - self._row_started
            line = f"[{self._at}/{self._total}] {self._name}: {text} ({seconds:.0f} s)"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        now = time.monotonic()
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        line = f"[{self._at}/{self._total}] {now - self._started:5.0f} s  {self._name:26} {text}"
        print(f"{clear}{line} ({now - self._row_started:.0f} s)", file=sys.stderr, flush=True)


def brief(row: dict[str, Any]) -> str:
    if "saves" not in row:
        return f"no row: {str(row.get('error')).splitlines()[0][:120]}"
    blocked, lost, durable = (row[key] and row[key]["median"] for key in ("blocked", "lost", "durable"))
    numbers = [report.number(value) for value in (blocked, lost, durable, row["restore_cold"])]
    return f"{row['saves']} saves: blocked {numbers[0]} lost {numbers[1]} durable {numbers[2]} restore {numbers[3]} s"


def measure_every(settings: Settings, iterations: int) -> dict[str, Any]:
    """stepwell with a snapshot in memory at every iteration."""
    conductor = Conductor(settings, "stepwell")
    try:
        spec = conductor.spec("every", conductor.where / "run", iterations=iterations)
        (conductor.where / "run").mkdir()
        found, _ = conductor.run("peer.trainer", spec, timeout=600)
    finally:
        shutil.rmtree(conductor.where, ignore_errors=True)
    for name in ("clean", "clean_after", "every"):
        if name in found:
            found[f"{name}_median"] = statistics.median(found[name])
    return found


def state_bytes(settings: Settings) -> int:
    """Of the state that will be saved: parameters and two moments."""
    from peer.workload import GPT, SIZES

    torch = __import__("torch")
    with torch.device("meta"):
        return 12 * sum(parameter.numel() for parameter in GPT(SIZES[settings.size]).parameters())


def main() -> None:
    options = arguments()
    if options.draw:
        write(json.loads((options.out / "results.json").read_text()), options.out)
        return
    torch = __import__("torch")
    device = "cuda" if options.size == "gpu" or (options.size == "tiny" and torch.cuda.is_available()) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--size gpu needs CUDA")
    names = chosen(options)
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=options.scratch or options.out))
    stored = options.out / "results.json"
    earlier = json.loads(stored.read_text()) if options.append and stored.exists() else {}
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(device),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "loop": options.loop,
        "limits": earlier.get("limits", {}),
        "rows": earlier.get("rows", {}),
        "every": earlier.get("every"),
        "order": earlier.get("order", []) + names,
    }
    bar = Bar(len(names))
    threads = min(2, os.cpu_count() or 1) if device == "cpu" else 8
    settings = Settings(
        size=options.size,
        loop=options.loop,
        device=device,
        threads=threads,
        saves=options.saves,
        budget=options.budget,
        kills=options.kills,
        join_restores=options.join_restores,
        scratch=scratch,
        progress=bar.show,
    )
    try:
        run(options, settings, result, names, bar)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.markdown(result))
    print(f"in {options.out}: results.json, results.md, results.png", file=sys.stderr)


def run(options: Any, settings: Settings, result: dict[str, Any], names: list[str], bar: Bar) -> None:
    """Limits, then row after row; results are written after each, so that a stopped run leaves what it has."""
    size, started = state_bytes(settings), time.monotonic()
    if not options.no_limits and "write" not in result["limits"]:
        print("measuring the limits of disk and memory", file=sys.stderr, flush=True)
        result["limits"] = {
            **limits.in_another_process(settings.scratch, size),
            **limits.memory_limits(),
            **(limits.device_limits() if settings.device == "cuda" else {}),
            "again": [],
        }
        write(result, options.out)
    cells = {kind: result["limits"][kind]["best"] for kind in ("write", "read") if kind in result["limits"]}
    own = options.own_budget or 3 * options.budget
    for number, name in enumerate(names):
        if time.monotonic() - started > options.deadline:
            result["rows"][name] = {"label": name, "error": "no time was left in this run"}
            continue
        bar.row(name)
        is_ours = name == "stepwell"
        if cells and (is_ours or number % options.probe_every == 0):
            result["limits"]["again"].append(limits.in_another_process(settings.scratch, size, cells))
        mine = Settings(**{**vars(settings), "budget": own}) if is_ours else settings
        raw = Conductor(mine, name).measure()
        result["rows"][name] = figures.of_row(raw, settings.device)
        bar.done(brief(result["rows"][name]))
        write(result, options.out)
        if is_ours and options.every:
            result["every"] = measure_every(settings, options.every)
            write(result, options.out)
    write(result, options.out)


def write(result: dict[str, Any], out: Path) -> None:
    result["rows"] = {name: result["rows"][name] for name in ROWS if name in result["rows"]}
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "results.md").write_text(report.markdown(result))
    try:
        picture.draw(result, out / "results.png")
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
