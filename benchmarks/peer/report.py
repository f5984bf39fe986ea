"""The table for people, from the figures."""

from __future__ import annotations

from typing import Any

SAVING = (
    "peer",
    "saves",
    "call s",
    "blocked 1st s",
    "blocked s (median / max)",
    "slow-down (median / worst)",
    "lost per save s (median / max)",
    "durable s (median / max)",
    "x write limit",
    "memory GB (peak / kept)",
    "CPU s",
)
BACK = (
    "peer",
    "restore cold / warm s",
    "x read limit",
    "consistent",
    "SIGKILL at 0.15 s",
    "3 flipped bits",
    "notes",
)


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def pair(found: dict[str, float] | None, digits: int = 3) -> str:
    return "-" if found is None else f"{found['median']:.{digits}f} / {found['max']:.{digits}f}"


def table(head: tuple[str, ...], lines: list[list[str]]) -> list[str]:
    rows = [list(head), ["---"] * len(head), *lines]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def limit_rate(limits: dict[str, Any], kind: str) -> float | None:
    """The best rate seen, the probes between the rows included."""
    if kind not in limits:
        return None
    return max([limits[kind]["best"]["rate"], *(probe[kind] for probe in limits.get("again", []))])


def markdown(result: dict[str, Any]) -> str:
    """The whole report."""
    rows, limits = result["rows"], result["limits"]
    ran = {name: row for name, row in rows.items() if "saves" in row}
    write, read = limit_rate(limits, "write"), limit_rate(limits, "read")
    lines = [f"# Checkpointing beside its peers, {result['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [f"- commit: {result['commit']}", f"- command: `{result['command']}`"]
    some = next(iter(ran.values()), None)
    if some is not None:
        clean = sorted(row["clean"]["median"] for row in ran.values())
        lines += [
            f"- state: {some['state_bytes'] / 1e9:.3f} GB in {some['tensors']} tensors; loop `{result['loop']}`, clean "
            f"iteration {clean[0] * 1e3:.1f} to {clean[-1] * 1e3:.1f} ms (medians of the rows)"
        ]
        foreign = [row["foreign_cores"] for row in ran.values()]
        lines += [f"- other programs kept {min(foreign):.2f} to {max(foreign):.2f} cores busy meanwhile"]
    lines += ["", "## Limits in the same run", "", *_limits(limits)]
    lines += ["", "## Saving", "", *table(SAVING, [_saving(row, write) for row in ran.values()])]
    lines += ["", "## Coming back", "", *table(BACK, [_back(row, read) for row in ran.values()])]
    if result.get("every"):
        lines += ["", "## stepwell, in-memory snapshot at every iteration", "", *_every(result["every"])]
    if "stepwell" in ran:
        lines += ["", "## stepwell against the limits and the best peer", "", *_verdict(ran, limits)]
    missing = {name: row for name, row in rows.items() if "saves" not in row}
    if missing:
        reasons = [[row["label"], str(row.get("error", "")).replace("\n", " ")[:200]] for row in missing.values()]
        lines += ["", "## Did not run", "", *table(("peer", "why"), reasons)]
    lines += ["", "Columns: `benchmarks/README.md`. (*) the peer does not fsync; the benchmark did, and counted it."]
    return "\n".join(lines) + "\n"


def _limits(limits: dict[str, Any]) -> list[str]:
    lines = []
    for kind in ("write", "read"):
        if kind in limits:
            found, again = limits[kind], [probe[kind] / 1e9 for probe in limits.get("again", [])]
            best = found["best"]
            between = f"; between the rows {min(again):.2f} to {max(again):.2f}" if again else ""
            lines.append(
                f"- {kind}: {best['rate'] / 1e9:.2f} GB/s ({best['threads']} threads, {best['block'] >> 20} MiB; "
                f"median of the best cells {found['median_rate'] / 1e9:.2f}{between})"
            )
    names = [name for name, value in limits.items() if isinstance(value, float)]
    if names:
        lines.append("- " + ", ".join(f"{name.replace('_', ' ')} {limits[name] / 1e9:.1f} GB/s" for name in names))
    return lines or ["- not measured"]


def _ratio(seconds: float | None, size: int, rate: float | None) -> str:
    return "-" if seconds is None or not rate else f"{seconds / (size / rate):.2f}"


def _saving(row: dict[str, Any], write: float | None) -> list[str]:
    durable = row["durable"]
    mark = "" if row["fsyncs"] != "no" else " (*)"
    slow = f"{number(row['slow_median'], 2)} / {number(row['slow_worst'], 2)}"
    return [
        row["label"],
        str(row["saves"]),
        number(row["call"]["median"] if row["call"] else None),
        number(row["blocked_first"]),
        pair(row["blocked"]),
        slow,
        pair(row["lost"]),
        pair(durable, 2) + mark,
        _ratio(durable["median"] if durable else None, row["state_bytes"], write),
        f"{row['memory_peak'] / 1e9:.2f} / {row['memory_kept'] / 1e9:.2f}",
        number(row["cpu"]["median"] if row["cpu"] else None, 2),
    ]


def _back(row: dict[str, Any], read: float | None) -> list[str]:
    cold = row["restore_cold"]
    times = f"{number(cold, 2)} / {number(row['restore_warm'], 2)}"
    if row.get("restore_arena") is not None:
        times += f"; from memory {row['restore_arena']:.2f}"
    ratio = _ratio(cold, row["state_bytes"], read)
    return [row["label"], times, ratio, row["consistent"], row["killed"], row["damaged"], "; ".join(row["notes"])]


def _every(every: dict[str, Any]) -> list[str]:
    if "overhead_percent" not in every:
        return [f"- not measured: {every.get('why_not') or every.get('error')}"]
    size, worst = every["state_bytes"] / 1e9, max(every["every"])
    before, after, with_it = (1e3 * every[f"{name}_median"] for name in ("clean", "clean_after", "every"))
    return [
        f"- {every['overhead_percent']:.2f} % on the median iteration: clean {before:.1f} ms before and {after:.1f} ms "
        f"after, {with_it:.1f} ms with snapshots (worst {1e3 * worst:.1f} ms)",
        f"- {len(every['every'])} iterations, {every['snapshots']} snapshots of {size:.2f} GB, {every['skipped']} "
        f"skipped, {every['void']} void",
    ]


def _verdict(ran: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """The issue's comparisons, computed."""
    ours = ran["stepwell"]
    size, lines = ours["state_bytes"], []
    if ours["blocked"] and ours["blocked"]["median"] > 0:
        lines.append(f"- first save / later ones, blocked: {ours['blocked_first'] / ours['blocked']['median']:.2f}")
    gates = ours["facts"].get("gate_seconds") or []
    lines.append(f"- gate waited {len(gates)} times, at most {max(gates, default=0) * 1e3:.1f} ms")
    peers = [row for name, row in ran.items() if name != "stepwell" and row["lost"] and row["consistent"] == "yes"]
    if peers and ours["lost"]:
        best = min(peers, key=lambda row: row["lost"]["median"])
        mine, theirs = ours["lost"]["median"], best["lost"]["median"]
        share = f"{mine / theirs:.2f} of the" if min(mine, theirs) > 0 else f"{mine:.3f} s (noise), against the"
        lines.append(f"- lost per save: {share} best consistent peer ({best['label']}, {theirs:.3f} s)")
    figures = {"write": ours["durable"] and ours["durable"]["median"], "read": ours["restore_cold"]}
    for kind, seconds in figures.items():
        rate = limit_rate(limits, kind)
        if seconds and rate:
            lines.append(f"- {kind}: {size / seconds / 1e9:.2f} GB/s, {100 * size / seconds / rate:.0f} % of the limit")
    if ours["restore_arena"] and "host_to_device" in limits:
        rate = size / ours["restore_arena"]
        share = 100 * rate / limits["host_to_device"]
        lines.append(f"- restore from memory: {rate / 1e9:.2f} GB/s, {share:.0f} % of host to device")
    peak = ours["memory_peak"]
    lines.append(f"- host memory: {peak / 1e9:.2f} GB = 2 x state {(peak - 2 * size) / 1e6:+.0f} MB")
    return lines
