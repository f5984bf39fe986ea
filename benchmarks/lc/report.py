"""Where a result comes from, and its three forms: JSON, a table, a picture."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from peer.machine import commit, machine


def wait_while_quiet() -> None:
    """Others measure on this machine: the file named by STEPWELL_BENCH_QUIET, while it is there, pauses a run."""
    name = os.environ.get("STEPWELL_BENCH_QUIET")
    while name and Path(name).exists():
        time.sleep(1)


def origin(device: str = "cpu") -> dict[str, Any]:
    command = " ".join(["python", f"benchmarks/lc/{Path(sys.argv[0]).name}", *hide_folders(sys.argv[1:])])
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"machine": machine(device), "date": when, "command": command, "commit": commit()}


def hide_folders(arguments: Sequence[str]) -> list[str]:
    """Folders of this machine are nobody's business."""
    return [Path(a).name if os.sep in a and not a.startswith("-") and Path(a).is_absolute() else a for a in arguments]


def save(name: str, title: str, result: dict[str, Any], table: str, draw: Callable[[Any], None] | None, out: Path,
         device: str = "cpu", threads: str = "one thread used") -> None:  # fmt: skip
    """Write `name`.json and .md below `out`, and .png if there is something to draw."""
    result = {**origin(device), **result}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    facts = result["machine"]
    head = (
        f"# {title}, {result['date']}\n\n{'' if device == 'cpu' else facts['device'] + '; '}"
        f"{facts['processor']}, {facts['cores']} cores ({threads}), "
        f"{facts['memory']}; Python {facts['python']}, torch {facts['torch']}; commit {result['commit']}.\n"
        f"Command: `{result['command']}`\n\n"
    )
    (out / f"{name}.md").write_text(head + table + "\n")
    if draw is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw(pyplot)
    pyplot.tight_layout()
    pyplot.savefig(out / f"{name}.png", dpi=110)
    pyplot.close("all")


def rows(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    text = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    text += [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]
    return "\n".join(text) + "\n"


def interval(values: Sequence[float]) -> float:
    """Half the width of a 95 % confidence interval of the mean, by Student's t."""
    import numpy as np

    t = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20}
    n = len(values)
    return t.get(n - 1, 2.0) * float(np.std(values, ddof=1)) / n**0.5 if n > 1 else float("nan")
