"""`stepwell scavenge` and `stepwell flush`: datasets of the SCR interface, from the nodes' caches into the prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stepwell.adapters.scr.prefix_flush import conclude, open_ones
from stepwell.adapters.scr.prefix_index import Prefix
from stepwell.adapters.scr.salvage import Cached, carry, choose, find_caches, open_prefix, survey
from stepwell.errors import StepwellError
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.output import json_option, print_json, print_wrapped, say


@click.command()
@click.argument("prefix")
@click.argument("caches", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--all", "take_all", is_flag=True, help="Save all complete checkpoints, not only the newest.")
@click.option("--dry-run", is_flag=True, help="Show what would be copied.")
@json_option
def scavenge(prefix: str, caches: tuple[Path, ...], take_all: bool, dry_run: bool, as_json: bool) -> None:
    """Carry what is only in CACHES to PREFIX, after the last run. CACHES: of each node what was SCR_CACHE_BASE.

    Output first, then the newest checkpoint; parts of nodes that are lost are rebuilt from the others.
    """
    place = open_prefix(prefix)
    folders = find_caches(place, caches)
    found = survey(place, folders)
    _carry_all(place, folders, found, choose(found, take_all=take_all), dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("prefix")
@click.argument("caches", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Show what would be copied.")
@json_option
def flush(prefix: str, caches: tuple[Path, ...], dry_run: bool, as_json: bool) -> None:
    """End flushes to PREFIX that were broken off: those that lack only their end, and those whose parts are in CACHES.

    Not while the job runs: it does that by itself.
    """
    place = open_prefix(prefix)
    ended = []
    for id in [] if dry_run else open_ones(place):
        try:
            if conclude(place, id) is not None:
                ended.append(id.directory)
        except StepwellError as error:
            print_wrapped(f"could not complete  {id.directory}: {error}", indent="  ")
    folders = find_caches(place, caches)
    found = survey(place, folders)
    wanted = sorted((item for item in found if item.is_wanted and item.is_whole), key=lambda item: item.id)
    _carry_all(place, folders, found, wanted, dry_run=dry_run, as_json=as_json, ended=ended)


def _carry_all(
    place: Prefix,
    folders: dict[str, RunPaths],
    found: list[Cached],
    wanted: list[Cached],
    *,
    dry_run: bool,
    as_json: bool,
    ended: list[str] | None = None,
) -> None:
    failed: dict[str, str] = {}
    carried: list[tuple[Cached, int]] = []
    for item in wanted:
        try:
            carried.append((item, 0 if dry_run else carry(place, folders, item).nbytes))
        except (OSError, StepwellError) as error:
            failed[item.id.directory] = str(error)
    if as_json:
        print_json(_document(place, found, carried, failed, ended or []))
    else:
        _print(found, carried, failed, ended or [], dry_run)
    if failed:
        raise SystemExit(1)


def _print(
    found: list[Cached], carried: list[tuple[Cached, int]], failed: dict[str, str], ended: list[str], dry_run: bool
) -> None:
    for directory in ended:
        say(f"completed  {directory}")
    for item, nbytes in carried:
        size = "" if dry_run else f"  {wording.size(nbytes)}"
        say(f"{'would copy' if dry_run else 'copied'}  {item.description.name}{size}")
    for directory, reason in failed.items():
        print_wrapped(f"could not copy  {directory}: {reason}", indent="  ")
    for item in found:
        if not item.is_whole and not item.is_in_prefix:
            say(f"incomplete  {item.description.name}: parts are missing in these caches")
    if not carried and not failed and not ended:
        say("nothing to copy")


def _document(
    place: Prefix, found: list[Cached], carried: list[tuple[Cached, int]], failed: dict[str, str], ended: list[str]
) -> dict[str, Any]:
    return {
        "prefix": str(place.root),
        "ended": ended,
        "carried": [{"name": item.description.name, "nbytes": nbytes} for item, nbytes in carried],
        "failed": failed,
        "not_whole": [item.description.name for item in found if not item.is_whole and not item.is_in_prefix],
    }
