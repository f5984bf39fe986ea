"""`stepwell index`: the datasets in a prefix of the SCR interface, and which one a restart is to use."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import click

from stepwell.adapters.scr.prefix_flush import remove
from stepwell.adapters.scr.prefix_index import CHECKPOINT, OUTPUT, Index, ListedDataset, Prefix
from stepwell.adapters.scr.salvage import open_prefix
from stepwell.errors import ConfigError
from stepwell.tools.cli import wording
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, say

_COLUMNS = (
    Column("number", right=True),
    Column("name"),
    Column("kind"),
    Column("ranks", right=True, gives_way=2),
    Column("size", right=True, gives_way=1),
    Column("written", gives_way=3),
    Column("state"),
)


@click.command()
@click.argument("prefix", default=".")
@click.option("-p", "--prefix", "place", metavar="DIR", help="The same as PREFIX.")
@click.option("-l", "--list", "only_list", is_flag=True, help="List them (always done).")
@click.option("-c", "--current", metavar="NAME", help="Let the next restart use this one, or older ones if it fails.")
@click.option("-a", "--add", metavar="NAME", help="Offer it again after --drop, or after a program refused it.")
@click.option("--drop", metavar="NAME", help="Stop offering it; its files stay.")
@click.option("--drop-after", metavar="NAME", help="Stop offering newer ones; their files stay.")
@click.option("--delete", metavar="NAME", help="Remove it, and the program's names for its files.")
@json_option
def index(
    prefix: str,
    place: str | None,
    only_list: bool,
    current: str | None,
    add: str | None,
    drop: str | None,
    drop_after: str | None,
    delete: str | None,
    as_json: bool,
) -> None:
    """List the datasets in PREFIX, which was SCR_PREFIX of a program; or change what a restart is offered."""
    opened = open_prefix(place or prefix)
    if current is not None:
        opened.set_current(_find(opened, current).name, is_pinned=True)
    if add is not None:
        _offer(opened, _find(opened, add).id.directory)
    if drop is not None:
        opened.drop([_find(opened, drop).id])
    if drop_after is not None:
        last = _find(opened, drop_after).id
        opened.drop(item.id for item in opened.datasets() if item.id > last)
    if delete is not None:
        remove(opened, _find(opened, delete))
    found, known = opened.datasets(), opened.index()
    if as_json:
        print_json({"prefix": str(opened.root), "datasets": [_document(item, known) for item in found]})
    elif not found:
        say(f"no datasets in {opened.root}")
    else:
        print_table(_COLUMNS, [_row(item, known) for item in found])


def _find(place: Prefix, name: str) -> ListedDataset:
    found = place.find(name)
    if found is None:
        raise ConfigError(f"{name}: no such dataset in {place.root}; `stepwell index` lists them")
    return found


def _offer(place: Prefix, directory: str) -> None:
    def change(found: Index) -> Index:
        failed = {key: reason for key, reason in found.failed.items() if key != directory}
        return replace(found, failed=failed, dropped=tuple(key for key in found.dropped if key != directory))

    place.change_index(change)


def _kind(item: ListedDataset) -> str:
    flags = item.description.flags if item.description is not None else 0
    words = [word for bit, word in ((CHECKPOINT, "checkpoint"), (OUTPUT, "output")) if flags & bit]
    return "+".join(words) or "-"


def _state(item: ListedDataset, known: Index) -> str:
    directory = item.id.directory
    if directory in known.dropped:
        return "dropped"
    if directory in known.failed:
        return f"failed: {known.failed[directory]}"
    if item.name == known.current:
        return "current, chosen" if known.is_pinned else "current"
    return "" if item.is_live else "the run continued from another dataset"


def _row(item: ListedDataset, known: Index) -> list[str]:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.manifest.created))
    size, ranks = wording.size(item.manifest.nbytes), str(item.manifest.world_size)
    return [str(item.id.step), item.name, _kind(item), ranks, size, written, _state(item, known)]


def _document(item: ListedDataset, known: Index) -> dict[str, Any]:
    return {
        "number": item.id.step,
        "name": item.name,
        "kind": _kind(item),
        "ranks": item.manifest.world_size,
        "nbytes": item.manifest.nbytes,
        "created": item.manifest.created,
        "state": _state(item, known),
        "directory": item.id.directory,
    }
