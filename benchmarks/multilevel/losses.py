"""E5: which losses of nodes are survived. Every set of lost nodes up to one more than theory allows, for every scheme.

    python benchmarks/multilevel/losses.py --out build/multilevel [--nodes 4,5,6,7,8,9]

Caches are real directories, filled by the modules that agents use, one rank on each node; a restart is what ranks do,
without tensors (tests/levels/field.py). Survived: the newest checkpoint is back on all ranks, on other nodes than
before, and every byte is right. The tests are tests/levels/test_losses.py; this only counts and draws.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import result

from tests.levels.field import NEW, Field
from tests.levels.test_losses import LOSSES, NAMES, SCHEMES

SPEECH = {"rs2": "Reed-Solomon, 2", "rs3": "Reed-Solomon, 3", "xor": "XOR"}


def count(folder: Path, n: int, scheme: str) -> list[dict[str, int]]:
    """For 0, 1, ... lost nodes: how many losses there are, were survived, should be, and how often a byte was wrong."""
    domains, found = NAMES[:n], []
    whole = Field(folder / "whole", domains, SCHEMES[scheme](n))
    whole.build()
    for lost_count in range(LOSSES[scheme] + 2):
        row = {"lost": lost_count, "cases": 0, "survived": 0, "theory": 0, "wrong": 0}
        for lost in combinations(domains, lost_count):
            field = whole.copy(folder / "job")
            field.lose(lost)
            seats = ["x" if node in lost else node for node in reversed(domains)]
            restart = field.restart(seats, lambda rank, part: part in ((rank + 1) % n, n - 1 - rank))
            row["cases"] += 1
            row["survived"] += restart.id == NEW
            row["theory"] += field.is_recoverable(lost)
            for contents in restart.read:
                row["wrong"] += sum(field.contents[NEW][part] != content for part, content in contents.items())
            shutil.rmtree(field.folder)
        found.append(row)
    shutil.rmtree(whole.folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nodes", default="4,5,6,7,8,9")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.fsync = lambda fd: None  # nothing here is about power
    found: dict[str, Any] = {**result.begin(), "rows": {}}
    for n in map(int, options.nodes.split(",")):
        for scheme in SCHEMES:
            with tempfile.TemporaryDirectory(dir=options.out) as name:
                found["rows"].setdefault(scheme, {})[n] = count(Path(name), n, scheme)
            print(f"{n} nodes, {scheme}: {found['rows'][scheme][n]}", flush=True)
            write(options.out, found)
    print((options.out / "losses.md").read_text())


def write(out: Path, found: dict[str, Any]) -> None:
    most = max(LOSSES.values()) + 1
    rows = [["nodes", "protection", *(f"{lost} lost" for lost in range(1, most + 1)), "as theory says", "wrong bytes"]]
    for scheme, sizes in found["rows"].items():
        for n, counts in sizes.items():
            by_lost = {row["lost"]: row for row in counts}
            cells = [by_lost.get(lost) for lost in range(1, most + 1)]
            agrees = all(row["survived"] == row["theory"] for row in counts)
            wrong = sum(row["wrong"] for row in counts)
            shown = ["" if cell is None else f"{cell['survived']} of {cell['cases']}" for cell in cells]
            rows.append([n, SPEECH.get(scheme, scheme), *shown, "yes" if agrees else "NO", wrong])
    total = sum(row["cases"] for sizes in found["rows"].values() for counts in sizes.values() for row in counts)
    text = f"# E5: which losses of nodes are survived\n\n{total} losses.\n\n{result.table(rows)}"

    def draw(pyplot: Any) -> None:
        names = list(found["rows"])
        sizes = sorted({n for row in found["rows"].values() for n in row})
        _, axes = pyplot.subplots(1, len(names), figsize=(2.3 * len(names), 3), sharey=True, squeeze=False)
        for axis, scheme in zip(axes[0], names, strict=True):
            shares = [[float("nan")] * most for _ in sizes]
            for at, n in enumerate(sizes):
                for row in found["rows"][scheme].get(n, []):
                    if row["lost"]:
                        shares[at][row["lost"] - 1] = row["survived"] / row["cases"]
            axis.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            for at, line in enumerate(shares):
                for lost, share in enumerate(line):
                    if share == share:
                        axis.text(lost, at, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
            axis.set_title(SPEECH.get(scheme, scheme), fontsize=9)
            axis.set_xticks(range(most), [str(lost + 1) for lost in range(most)])
            axis.set_yticks(range(len(sizes)), [str(n) for n in sizes])
            axis.set_xlabel("lost")
        axes[0][0].set_ylabel("nodes")
        pyplot.suptitle("survived, per cent of all losses", fontsize=10)

    result.write(out, "losses", found, text, draw)


if __name__ == "__main__":
    main()
