"""What a part of many_ranks.py leaves: JSON, and a table for people, with a straight line through it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from peer.machine import commit, machine

import stepwell

Row = dict[str, Any]


def head(part: str) -> dict[str, Any]:
    """Where the figures come from."""
    source = Path(stepwell.__file__).resolve().parents[2]
    ask = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    return {
        "part": part,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine("cpu"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "stepwell": subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or str(source),
    }


def fit(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Least squares: seconds of one rank more, seconds of none, and the share of the variance that this explains."""
    points = [(float(row["ranks"]), float(row[name])) for row in rows if name in row]
    if len(points) < 3:
        return {}
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    total = sum((y - mean_y) ** 2 for _, y in points)
    return {"each": slope, "none": mean_y - slope * mean_x, "r2": 1 - rest / total if total else 1.0}


def write(result: dict[str, Any], columns: Sequence[str], out: Path) -> str:
    """Keep both forms below `out`; the text."""
    out.mkdir(parents=True, exist_ok=True)
    name = result["head"]["part"]
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result, columns)
    (out / f"{name}.md").write_text(text)
    return text


def table(result: dict[str, Any], columns: Sequence[str]) -> str:
    """For people."""
    top = result["head"]
    facts = ", ".join(f"{key} {value}" for key, value in top["machine"].items())
    lines = [f"# Many ranks: {top['part']}, {top['date']}", "", f"Machine: {facts}.", ""]
    lines += [f"Command: `{top['command']}`, commit {top['commit']}; stepwell under test: {top['stepwell']}.", ""]
    lines += ["| ranks | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in result["rows"]:
        cells = [_cell(row.get(name, "")) for name in columns] if "error" not in row else [row["error"][:200]]
        lines.append(f"| {row['ranks']} | " + " | ".join(cells) + " |")
    for name, line in result["fits"].items():
        if line:
            lines += ["", f"{name}: {line['none']:.3g} + {1e3 * line['each']:.3g} / 1,000 ranks (R2 {line['r2']:.3f})"]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
