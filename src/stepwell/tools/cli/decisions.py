"""`stepwell show --policy`: how often a run checkpoints at present, why, and what it decided before."""

from __future__ import annotations

from typing import Any, Final

from stepwell.events.journal import read_events
from stepwell.storage.store.learned import read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.output import Column, print_json, print_table, print_wrapped, say

_COLUMNS: Final = (
    Column("decided"),
    Column("step", right=True),
    Column("every", right=True),
    Column("bound by"),
    Column("iteration", right=True, gives_way=2),
    Column("cost", right=True),
    Column("durable", right=True, gives_way=1),
)
_MOST: Final = 20


def show_policy(paths: RunPaths, *, as_json: bool) -> None:
    """Print it. A run whose frequency is fixed has decided nothing."""
    found = [event for event in read_events(paths.events) if event["kind"] == "decision"]
    history = read_history(paths.history)
    if as_json:
        failures = {"failures": history.failures, "uptime_seconds": history.uptime + history.seconds}
        print_json({"run": str(paths.root), "decisions": found, **failures})
        return
    if not found:
        say("The run has not chosen an interval: it is fixed, or the first checkpoint is not measured yet.")
        return
    print_wrapped(str(found[-1].get("sentence", "")), indent="")
    if history.failures:
        uptime = wording.span(history.uptime + history.seconds)
        print_wrapped(f"{wording.count(history.failures, 'failure')} in {uptime} of training.", indent="")
    say()
    print_table(_COLUMNS, [_row(event) for event in found[-_MOST:]])


def _row(event: dict[str, Any]) -> list[str]:
    def seconds(key: str) -> str:
        value = event.get(key)
        return f"{value:.3g} s" if isinstance(value, int | float) else ""

    return [
        f"{wording.age(float(event.get('time', 0)))} ago",
        str(event.get("step", "")),
        seconds("seconds"),
        str(event.get("term", "")),
        seconds("iteration_seconds"),
        seconds("checkpoint_seconds"),
        seconds("durable_seconds"),
    ]
