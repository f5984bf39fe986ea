"""`stepwell halt`: tell a job of the SCR interface when to stop."""

from __future__ import annotations

import datetime
from dataclasses import asdict, replace
from typing import Final

import click

from stepwell.adapters.scr.prefix_index import Halt
from stepwell.adapters.scr.salvage import open_prefix
from stepwell.errors import ConfigError
from stepwell.tools.cli.output import json_option, print_json, say

_UNSET: Final = {
    "unset_checkpoints": "checkpoints_left",
    "unset_before": "exit_before",
    "unset_after": "exit_after",
    "unset_seconds": "seconds",
    "unset_reason": "reason",
}
"""Flag -> what it takes back."""


@click.command()
@click.argument("prefix", default=".")
@click.option("-i", "--immediate", is_flag=True, help="Stop at the next should_exit() or need_checkpoint().")
@click.option("-c", "--checkpoints", type=click.IntRange(min=0), metavar="N", help="Stop after N more checkpoints.")
@click.option("-b", "--before", metavar="TIME", help="Stop before this time: seconds since 1970, or 2026-11-16T08:00.")
@click.option("-a", "--after", metavar="TIME", help="Stop at the first occasion after this time.")
@click.option(
    "-s", "--seconds", type=click.FloatRange(min=0), metavar="S", help="Stop S seconds before the time limit."
)
@click.option("-l", "--list", "only_list", is_flag=True, help="Show the current settings (always done).")
@click.option("--unset-checkpoints", is_flag=True, help="Remove this setting.")
@click.option("--unset-before", is_flag=True, help="Remove this setting.")
@click.option("--unset-after", is_flag=True, help="Remove this setting.")
@click.option("--unset-seconds", is_flag=True, help="Remove this setting.")
@click.option("--unset-reason", is_flag=True, help="Remove --immediate, and whatever else stopped the job.")
@click.option("-r", "--remove", is_flag=True, help="Remove all settings.")
@json_option
def halt(
    prefix: str,
    immediate: bool,
    checkpoints: int | None,
    before: str | None,
    after: str | None,
    seconds: float | None,
    only_list: bool,
    remove: bool,
    as_json: bool,
    **unset: bool,
) -> None:
    """Tell the job in PREFIX when to stop; without options, show what it was told.

    A program asks with should_exit(), and need_checkpoint() says yes once more before it goes.
    """
    place = open_prefix(prefix)

    def change(found: Halt) -> Halt:
        kept = Halt() if remove else found
        new = replace(kept, **{field: getattr(Halt(), field) for name, field in _UNSET.items() if unset[name]})
        if immediate:
            new = replace(new, reason="STOPPED_BY_USER")
        if checkpoints is not None:
            new = replace(new, checkpoints_left=checkpoints)
        if before is not None:
            new = replace(new, exit_before=_time(before))
        if after is not None:
            new = replace(new, exit_after=_time(after))
        return new if seconds is None else replace(new, seconds=seconds)

    told = asdict(place.change_halt(change))
    if as_json:
        print_json({"prefix": str(place.root), **told})
        return
    facts = [f"{key}: {value}" for key, value in told.items() if value not in ("", None, 0.0)]
    for fact in facts or ["nothing: the job continues"]:
        say(fact)


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{text}: give seconds since 1970, or a time such as 2026-11-16T08:00") from None
