"""`stepwell halt`: tell a job of the SCR interface when to stop."""

from __future__ import annotations

import datetime
from dataclasses import asdict, replace

import click

from stepwell.adapters.scr.index import Halt
from stepwell.adapters.scr.salvage import open_prefix
from stepwell.cli.output import json_option, print_json
from stepwell.errors import ConfigError


@click.command()
@click.argument("prefix", default=".")
@click.option("--immediate", is_flag=True, help="At the next should_exit() or need_checkpoint().")
@click.option("--checkpoints", type=click.IntRange(min=0), metavar="N", help="After N more checkpoints.")
@click.option("--before", metavar="TIME", help="So that it ends before; seconds since 1970 or 2026-11-16T08:00.")
@click.option("--after", metavar="TIME", help="At the first occasion after.")
@click.option("--seconds", type=click.FloatRange(min=0), metavar="S", help="Stop S seconds before the time is over.")
@click.option("--remove", is_flag=True, help="Take everything back.")
@json_option
def halt(
    prefix: str,
    immediate: bool,
    checkpoints: int | None,
    before: str | None,
    after: str | None,
    seconds: float | None,
    remove: bool,
    as_json: bool,
) -> None:
    """Tell the job in PREFIX when to stop; without options, show what it was told.

    A program asks with should_exit(), and need_checkpoint() says yes once more before it goes.
    """
    place = open_prefix(prefix)

    def change(found: Halt) -> Halt:
        new = Halt() if remove else found
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
    click.echo("\n".join(facts) or "nothing: the job goes on")


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{text}: give seconds since 1970, or a time as 2026-11-16T08:00") from None
