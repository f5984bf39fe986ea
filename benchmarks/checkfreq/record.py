"""What every experiment here has alike: its options, its result files, a process of its own for each part.

Owns:    `NAME.json`, `NAME.md` and `NAME.png` in --out, written anew after every part; and time: a part gets its share
         of what is left of --seconds, and is ended when it takes much longer.
Holds:   `import record` comes first in a script: it makes `stepwell` and `peer` importable from a bare checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SOURCES = [str(REPOSITORY / "src"), str(HERE.parent), str(HERE)]
sys.path[:0] = [path for path in SOURCES if path not in sys.path]

import torch  # noqa: E402
from networks import NETWORKS, SHORT, Missing  # noqa: E402
from peer.machine import commit, machine  # noqa: E402

QUICK = ("resnet18",)
PATIENCE = 45.0
"""Seconds that a part may start up and run over before it is ended."""


def parser(
    text: str | None, *, seconds: float, networks: str = "", quick_seconds: float = 22
) -> argparse.ArgumentParser:
    """The options that all have. `networks`: which ones by default, with commas; all seven where none is given."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="folder for the result")
    made.add_argument("--scratch", type=Path, help="folder on the disk to be measured (default: --out)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--quick", action="store_true", help="small stand-ins for the networks: seconds, on any machine")
    made.add_argument("--seconds", type=float, help=f"for all of it (default: {seconds:g}; quick: {quick_seconds:g})")
    made.add_argument("--precision", choices=("bf16", "tf32"), default="bf16", help="on CUDA")
    made.add_argument("--networks", help=f"of {', '.join(NETWORKS)}, with commas (quick: {','.join(QUICK)})")
    made.add_argument("--batch", type=int, help="samples, in the place of each network's own number (overhead alone)")
    made.add_argument("--draw", action="store_true", help="only make table and picture anew from the JSON in --out")
    made.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own: arguments as JSON
    made.set_defaults(usual_seconds=seconds, usual_quick=quick_seconds, usual_networks=networks)
    return made


def die_with_parent() -> None:
    """Nothing is left behind by an experiment that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    options = made.parse_args()
    if options.part:
        die_with_parent()
    if options.seconds is None:
        options.seconds = options.usual_quick if options.quick else options.usual_seconds
    usual = options.usual_networks or ",".join(QUICK if options.quick else NETWORKS)
    options.networks = (options.networks or usual).split(",")
    unknown = set(options.networks) - NETWORKS.keys()
    if unknown:
        made.error(f"no such network: {', '.join(sorted(unknown))}; there are {', '.join(NETWORKS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: there is none")
    is_small = options.quick or options.draw or getattr(options, "short", False)
    if not is_small and options.device == "cpu" and options.part is None:
        print("note: the full networks on the CPU take very long; --quick is meant for it", file=sys.stderr)
    return options


class Record:
    """A result as it grows."""

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        *,
        markdown: Callable[[dict[str, Any]], str],
        draw: Callable[[dict[str, Any], Any], None],
    ) -> None:
        self.name, self.options, self._markdown, self._draw = name, options, markdown, draw
        self.result: dict[str, Any] = {
            "experiment": name,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine(options.device),
            "commit": commit(),
            "command": " ".join(["python", f"benchmarks/checkfreq/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "settings": _settings(options),
            "rows": {},
        }
        options.out.mkdir(parents=True, exist_ok=True)

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.result["rows"][key] = row
        self.write()

    def redraw(self) -> None:
        """Table and picture anew, from the JSON that an earlier run left."""
        self.result = json.loads((self.options.out / f"{self.name}.json").read_text())
        self.write()
        print(self._markdown(self.result))

    def write(self) -> None:
        base = self.options.out / self.name
        base.with_suffix(".json").write_text(json.dumps(self.result, indent=1) + "\n")
        base.with_suffix(".md").write_text(self._markdown(self.result) + footer(self.result))
        try:
            import matplotlib
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        if any("error" not in row for row in self.result["rows"].values()):
            self._draw(self.result, pyplot)
            pyplot.savefig(base.with_suffix(".png"), dpi=110)
            pyplot.close("all")

    def finish(self) -> None:
        self.write()
        print(self._markdown(self.result))
        names = ", ".join(path.name for path in sorted(self.options.out.glob(f"{self.name}.*")))
        print(f"in {self.options.out}: {names}", file=sys.stderr)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    if options.quick or options.device == "cpu":
        precision = "fp32"
    else:
        precision = "bf16 autocast, fp32 weights" if options.precision == "bf16" else "fp32, TF32 products"
    nets = "small stand-ins (--quick)" if options.quick else "the networks themselves"
    return {"networks": nets, "precision": precision, "seconds": options.seconds, "device": options.device}


def footer(result: dict[str, Any]) -> str:
    found, settings = result["machine"], result["settings"]
    return (
        f"\n{found['device']}, {found['cores']} cores ({found['processor']}), {found['memory']},"
        f" torch {found['torch']}; {settings['networks']}, {settings['precision']}.\n"
        f"{result['date']}, commit {result['commit']}: `{result['command']}`\n"
    )


@contextlib.contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    """A folder for runs, on the disk that is measured; gone afterwards."""
    place = options.scratch or options.out
    place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(**more: str) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*SOURCES, *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def part(options: argparse.Namespace, arguments: dict[str, Any], *, seconds: float, **variables: str) -> dict[str, Any]:
    """Run this script with --part in a process of its own. Returns what it found, or {"error": why}."""
    with scratch(options) as folder:
        given = {**arguments, "until": time.time() + seconds, "folder": str(folder)}
        flags = ["--out", str(options.out), "--device", options.device, "--precision", options.precision]
        flags += ["--quick"] if options.quick else []
        flags += ["--batch", str(options.batch)] if options.batch else []
        flags += given.get("flags", [])
        command = [sys.executable, sys.argv[0], *flags, "--part", json.dumps(given)]
        process = subprocess.Popen(command, env=environment(**variables), start_new_session=True)
        try:
            status = process.wait(seconds + PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # interrupted: what the part has said is kept
            status = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the whole session of its own: the part and its neighbours
            process.wait()
        answer = folder / "answer.json"
        if answer.exists():
            return json.loads(answer.read_text())
        return {"error": f"ended after {seconds + PATIENCE:.0f} s" if status == -1 else f"exit status {status}"}


def left(arguments: dict[str, Any]) -> float:
    """Seconds that a part still has."""
    return arguments["until"] - time.time()


def answer(arguments: dict[str, Any], found: dict[str, Any]) -> None:
    """A part says what it found; it may do so several times, the last one counts."""
    place = Path(arguments["folder"]) / "answer.json"
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(place)


def for_networks(record: Record, names: Sequence[str], measure: Callable[[str, float], dict[str, Any]]) -> None:
    """One part a network; what is left of the time is shared by those that are left."""
    options, started = record.options, time.monotonic()
    for at, name in enumerate(names):
        rest = options.seconds - (time.monotonic() - started)
        share = rest * NETWORKS[name].weight / sum(NETWORKS[other].weight for other in names[at:])
        if share < 2:
            record.add(name, {"error": "no time was left"})
            continue
        row = measure(name, share)
        record.add(name, row)
        line = row.get("error") or row.get("brief", "done")
        print(
            f"[{at + 1}/{len(names)}] {time.monotonic() - started:4.0f} s  {name}: {line}", file=sys.stderr, flush=True
        )


# -- tables -----------------------------------------------------------------------------------------------------------


def one_process_each(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, dict[str, Any]], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Any], None],
) -> None:
    """An experiment that measures each network in a process of its own: this is all of its `main`."""
    if options.part:
        arguments = json.loads(options.part)
        try:
            answer(arguments, measure(options, arguments))
        except Missing as error:
            answer(arguments, {"error": str(error)})
        return
    sheet = Record(name, options, markdown=markdown, draw=draw)
    if options.draw:
        sheet.redraw()
        return
    for_networks(sheet, options.networks, lambda network, left: part(options, {"network": network}, seconds=left))
    sheet.finish()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.1f}"


def secs(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}x"


def label(name: str) -> str:
    return SHORT.label if name == SHORT.name else NETWORKS[name].label
