"""Exchanges of all ranks over torch's store: seconds, requests, and what one exchange weighs."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from many.crowd import Process, play
from many.report import Row

ABOUT = __doc__
CALLS = ("equal votes", "100 B each", "broadcast of 1 kB")
COLUMNS = (
    "open s", *(f"{name} {what}" for name in CALLS for what in ("s", "CPU s")), "store CPU s", "requests of a rank",
    "most requests",
)  # fmt: skip
FIT = ("open s", *(f"{name} CPU s" for name in CALLS), "store CPU s")
_SECONDS = 300.0
_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(size: int, options: argparse.Namespace) -> Row:
    """One row."""
    found, store = play(size, options.processes, options.node_size, _work)
    row: Row = {"store CPU s": store}
    for name in found[0]["times"]:
        row[name] = (sum if "CPU" in name else max)(result["times"][name] for result in found)
    requests = [count for result in found for count in result["requests"]]
    row["requests of a rank"] = statistics.median(requests)
    row["most requests"] = max(requests)
    return row


def _work(process: Process) -> dict[str, Any]:
    process.all_do(lambda group: group.barrier("connecting", _SECONDS))  # not timed: that is torch's
    times = {"open s": process.all_do(lambda group: group.open(_SECONDS))}
    process.share_tables()
    before = _requests(process)
    text = "x" * 1000
    calls: dict[str, Callable[[Any], Any]] = {
        "equal votes": lambda group: group.all_gather(None, "a vote", _SECONDS),
        "100 B each": lambda group: group.all_gather(f"{group.rank:0100d}", "values", _SECONDS),
        "broadcast of 1 kB": lambda group: group.broadcast(text if group.rank == 0 else None, "a word", _SECONDS),
    }
    for name, call in calls.items():
        tries = [(process.all_do(call), process.cpu_seconds) for _ in range(_ROUNDS)]
        times[f"{name} s"], times[f"{name} CPU s"] = (statistics.median(values) for values in zip(*tries, strict=True))
    after = _requests(process)
    requests = [(last - first) / (len(calls) * _ROUNDS) for first, last in zip(before, after, strict=True)]
    return {"times": times, "requests": requests}


def _requests(process: Process) -> list[int]:
    """So far, of each rank."""
    return [group._store.requests.total() for group in process.groups]
