"""From what was noted to the figures of the table. Every figure keeps its number of samples, median and maximum."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from peer.conductor import last_iteration


def stats(values: Sequence[float]) -> dict[str, float] | None:
    """None for nothing measured."""
    if not values:
        return None
    return {"n": len(values), "median": statistics.median(values), "max": max(values), "min": min(values)}


def of_row(raw: dict[str, Any], device: str) -> dict[str, Any]:
    """The figures of one row, or the reason why there are none."""
    kept = {key: raw[key] for key in ("label", "is_async", "fsyncs", "error") if key in raw}
    if "saves" not in raw:
        return {**kept, **{key: raw[key] for key in ("tail", "traceback") if raw.get(key)}}
    saves = raw["saves"]
    figures = {**kept, **_times(saves), **_memory(raw["memory"], device)}
    figures["cpu"] = stats(raw["cpu"])
    figures["foreign_cores"] = raw["foreign_cores"]
    figures["notes"] = saves["notes"]
    figures["facts"] = saves["facts"]
    for name in ("state_bytes", "tensors", "open_seconds", "file_bytes"):
        figures[name] = saves[name]
    for phase in ("cold", "warm", "arena"):
        figures[f"restore_{phase}"] = raw.get(phase, {}).get("newest", {}).get("seconds")
        if "error" in raw.get(phase, {}):
            figures["notes"] = [*figures["notes"], f"{phase} restore: {raw[phase]['error']}"]
    figures["cached_share"] = raw["cold"].get("cached_share")
    figures["consistent"] = _consistent(raw)
    figures["damaged"] = _damaged(raw.get("warm", {}))
    figures["killed"] = _killed(raw)
    return figures


def _times(saves: dict[str, Any]) -> dict[str, Any]:
    ends = saves["ends"]
    length = [b - a for a, b in pairwise(ends)]
    windows = [(save["mark"], last_iteration(save, ends)) for save in saves["saves"]]
    busy = {number for first, last in windows for number in range(first, last + 1)} | set(saves["disturbed"])
    calm = [length[n] for n in range(saves["clean_from"], windows[-1][1]) if n not in busy]
    clean = statistics.median(calm)
    blocked = [length[first] - clean for first, _ in windows]
    during = [length[n] / clean for first, last in windows for n in range(first + 1, last + 1)]
    lost = [sum(length[n] - clean for n in range(first, last + 1)) for first, last in windows]
    durable = [save["durable"] - save["started"] for save in saves["saves"]]
    return {
        "clean": {**stats(calm), "p95": sorted(calm)[int(0.95 * (len(calm) - 1))]},
        "saves": len(windows),
        "blocked_first": blocked[0],
        "blocked": stats(blocked[1:]),
        "call": stats([save["call"] for save in saves["saves"][1:]]),
        "call_first": saves["saves"][0]["call"],
        "staging_wait": stats([save["staging_wait"] for save in saves["saves"][1:]]),
        "slow_median": statistics.median(during) if during else None,
        "slow_worst": max([*during, *(length[first] / clean for first, _ in windows[1:])], default=None),
        "lost": stats(lost[1:]),
        "lost_first": lost[0],
        "done": stats([save["done"] - save["started"] for save in saves["saves"][1:]]),
        "durable": stats(durable[1:]),
        "durable_first": durable[0],
        # On CUDA the save is asked for while the device still works on the step that is saved.
        "durable_after_step": stats([s["durable"] - max(s["started"], ends[s["mark"]]) for s in saves["saves"][1:]]),
        "each_save": [
            {"blocked": held, "lost": gone, "durable": safe, "call": save["call"]}
            for held, gone, safe, save in zip(blocked, lost, durable, saves["saves"], strict=True)
        ],
    }


def _memory(memory: dict[str, dict[str, int]], device: str) -> dict[str, Any]:
    base = memory["baseline"]
    found = {}
    for name in ("peak", "kept"):
        ours = memory[name]["total"] - base["total"]
        system = memory[name]["system"] - base["system"]  # page-locked memory of the driver is in no process
        found[f"memory_{name}"] = max(ours, system) if device == "cuda" else ours
        found[f"memory_{name}_system"] = system
    return found


def _consistent(raw: dict[str, Any]) -> str:
    looked = [raw.get("cold", {}).get("newest"), raw.get("cold", {}).get("older")]
    looked += [raw.get("warm", {}).get("newest"), raw.get("arena", {}).get("newest")]
    seen = [found for found in looked if found and "stamps" in found]
    if not seen:
        return "not loadable"
    torn = [found for found in seen if len(found["stamps"]) > 1]
    wrong = [found for found in seen if found["stamps"] != [found["wanted"]]]
    if torn:
        return f"TORN ({len(torn)} of {len(seen)} loads)"
    return f"NO ({len(wrong)} of {len(seen)} loads)" if wrong else "yes"


def _damaged(warm: dict[str, Any]) -> str:
    flipped = warm.get("flipped")
    if flipped is None:
        return "not tried"
    if "refused" in flipped:
        return "refused"
    if flipped["stamps"] == [flipped["wanted"]]:
        return "loaded silently"
    both = "; both damaged: raises" if "refused" in warm.get("both_flipped", {}) else ""
    return f"refused, older used{both}"


def _killed(raw: dict[str, Any]) -> str:
    if not raw["is_async"]:
        return "synchronous"
    tries = [kill for kill in raw.get("kills", []) if "error" not in kill]
    if not tries:
        return "not tried"
    durable = sum(kill["is_durable"] for kill in tries)
    word = "durable" if durable == len(tries) else "sometimes" if durable else "LOST"
    return f"{word} ({durable} of {len(tries)})"
