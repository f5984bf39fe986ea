"""The picture: four panels, one bar a row, the measured limit as a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.report import limit_rate

Figure = Callable[[dict[str, Any]], Any]
OURS, THEIRS, TORN = "#1b7837", "#7a8fa6", "#d6604d"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in result["rows"].values() if "saves" in row][::-1]
    if not rows:
        return
    labels = [row["label"] for row in rows]
    colours = [TORN if row["consistent"] != "yes" else OURS if row["label"] == "stepwell" else THEIRS for row in rows]
    write, read = (limit_rate(result["limits"], kind) for kind in ("write", "read"))
    size = rows[0]["state_bytes"]
    figure, axes = pyplot.subplots(2, 2, figsize=(15, 3 + 0.66 * len(rows)), sharey=True)

    def panel(axis: Any, title: str, value: Figure, others: dict[str, Figure], limit: float | None, log: bool) -> None:
        values = [value(row) or 0.0 for row in rows]
        floor = 1e-3 if log else 0.0
        axis.barh(range(len(rows)), [max(v, floor) for v in values], color=colours, height=0.6)
        for (name, second), marker in zip(others.items(), "|D", strict=False):
            points = [(max(second(row), floor), at) for at, row in enumerate(rows) if second(row) is not None]
            if points:
                axis.scatter(*zip(*points, strict=True), marker=marker, s=70, color="black", label=name, zorder=3)
        if limit:
            axis.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"measured limit {limit:.2f} s")
        near = 0.08 * max(values)
        for at, v in enumerate(values):
            axis.text(
                max(v, floor), at + 0.31, f"{v:.3g}", va="bottom", ha="right" if log or v > near else "left", fontsize=7
            )
        axis.set_title(title, loc="left")
        axis.set_yticks(range(len(rows)), labels, fontsize=9)
        if log:
            axis.set_xscale("log")
            axis.set_xlim(left=floor)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("seconds, log scale" if log else "seconds")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncol=3, frameon=False, borderaxespad=0.2)

    def median(name: str) -> Figure:
        return lambda row: row[name] and row[name]["median"]

    def largest(name: str) -> Figure:
        return lambda row: row[name] and row[name]["max"]

    first = {"first save": lambda row: row["blocked_first"]}
    panel(axes[0][0], "blocked per save", median("blocked"), first, None, True)
    panel(axes[0][1], "training time lost per save", median("lost"), {"worst save": largest("lost")}, None, True)
    write_seconds, read_seconds = size / write if write else None, size / read if read else None
    panel(axes[1][0], "time to durable", median("durable"), {"worst save": largest("durable")}, write_seconds, False)
    more: dict[str, Figure] = {"warm": lambda row: row["restore_warm"]}
    more["from memory"] = lambda row: row["restore_arena"]
    panel(axes[1][1], "restore, cold", lambda row: row["restore_cold"], more, read_seconds, False)
    patches = [Patch(color=OURS), Patch(color=THEIRS), Patch(color=TORN)]
    figure.legend(patches, ["stepwell", "peer", "loaded state not consistent"], loc="upper right", ncol=3, fontsize=9)
    facts = f"{size / 1e9:.2f} GB of state, loop {result['loop']}, {result['machine']['device']}, {result['date']}"
    figure.suptitle(f"Saving and restoring: {facts} (shorter is better)", x=0.02, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)
