"""What the experiments have alike: NAME.json, NAME.md and NAME.png in a folder, with machine, date, command, commit.

`import result` comes first in a script: it makes `stepwell`, `peer` and `tests` importable from a bare checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SOURCES = [str(REPOSITORY / "src"), str(HERE.parent), str(REPOSITORY)]
sys.path[:0] = [path for path in SOURCES if path not in sys.path]

from peer.machine import commit, machine  # noqa: E402


def begin() -> dict[str, Any]:
    """A result that says where it comes from."""
    name = Path(sys.argv[0]).name
    return {
        "command": " ".join(["python", f"benchmarks/multilevel/{name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine("cpu"),
    }


def table(rows: Sequence[Sequence[object]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def write(out: Path, name: str, result: dict[str, Any], text: str, draw: Callable[[Any], None]) -> None:
    """All three files, anew. `draw` is given pyplot."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    place = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    footer = f"\n{result['date']}, commit {result['commit']}: `{result['command']}`; {place}\n"
    (out / f"{name}.md").write_text(text + footer)
    try:
        import matplotlib
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw(pyplot)
    pyplot.tight_layout()
    pyplot.savefig(out / f"{name}.png", dpi=110)
    pyplot.close("all")
