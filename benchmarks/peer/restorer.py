"""The child that loads: `python -m peer.restorer SPEC`. Fresh process, fresh model and optimizer.

cold    ask the parent to empty the cache, load the newest, time it; then look at the older one
warm    read the files once, load, time it; then ask the parent to damage the newest and load again
arena   stepwell only: a lingering agent has the state in memory
check   load this step, and say whether it is whole
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from peer import disk
from peer.parent import Parent
from peer.rows import row_class
from peer.rows.base import Row
from peer.workload import Workload, build


def load(work: Workload, row: Row, step: int, *, peek: bool = False) -> dict[str, Any]:
    """Seconds until the state was on its device, and the stamps found there."""
    work.wipe()
    if work.is_cuda:
        torch.cuda.synchronize()
    started = time.monotonic()
    (row.peek if peek else row.load)(step)
    if work.is_cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    return {"seconds": seconds, "wanted": step, "stamps": work.found_stamps()[:8]}


def attempt(work: Workload, row: Row, step: int) -> dict[str, Any]:
    """Load, and take a refusal for an answer."""
    try:
        return load(work, row, step)
    except BaseException as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300], "wanted": step}


def run(spec: dict[str, Any], parent: Parent) -> dict[str, Any]:
    work = build(spec["size"], loop=spec["loop"], device=spec["device"], kill=spec.get("kill", False))
    work.fill_optimizer()
    row = row_class(spec["row"])(Path(spec["where"]), work)
    row.import_all()
    steps, phase = spec["steps"], spec["phase"]
    if phase == "cold":
        return cold(work, row, steps, parent)
    if phase == "warm":
        return warm(work, row, steps, parent)
    if phase == "both":
        return {"cold": cold(work, row, steps, parent), "warm": warm(work, row, steps, parent)}
    return {"newest": attempt(work, row, steps[-1])}


def cold(work: Workload, row: Row, steps: list[int], parent: Parent) -> dict[str, Any]:
    left = parent.ask("cold")
    result = {"newest": load(work, row, steps[-1]), "cached_share": float(left or 1.0)}
    if len(steps) > 1:
        result["older"] = load(work, row, steps[-2], peek=True)
    return result


def warm(work: Workload, row: Row, steps: list[int], parent: Parent) -> dict[str, Any]:
    for found in disk.files_under(row.path(steps[-1])):
        with found.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    result = {"newest": load(work, row, steps[-1])}
    parent.ask("flip", number=1)
    result["flipped"] = attempt(work, row, steps[-1])
    if row.label == "stepwell":
        parent.ask("flip", number=2)
        result["both_flipped"] = attempt(work, row, steps[-1])
    return result


def main() -> None:
    spec = json.loads(sys.argv[1])
    parent = Parent()
    torch.set_num_threads(spec["threads"])
    try:
        result = run(spec, parent)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    Path(spec["result"]).write_text(json.dumps(result))
    parent.ask("finished")


if __name__ == "__main__":
    main()
