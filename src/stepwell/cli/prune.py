"""`stepwell prune`: retention by hand, for a run that nobody works on."""

from __future__ import annotations

import logging
from typing import Any

import click

from stepwell import events, journal
from stepwell.cli import wording
from stepwell.cli.liveness import look_for_life
from stepwell.cli.locate import find_run
from stepwell.cli.output import json_option, print_json, print_wrapped
from stepwell.cli.survey import Surveyed, survey
from stepwell.errors import ConfigError, StepwellError
from stepwell.store import retention
from stepwell.store.lineage import newest_number
from stepwell.store.paths import RunPaths
from stepwell.types import Keep


@click.command()
@click.argument("run")
@click.option("--keep", default=2, show_default=True, metavar="N", help="Keep the newest N good ones (2 at least).")
@click.option("--every", type=int, metavar="N", help="Also keep those whose step is a multiple of N.")
@click.option("--epochs", is_flag=True, help="Also keep those of the ends of epochs.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--force", is_flag=True, help="Even while a process works on the run.")
@json_option
def prune(run: str, keep: int, every: int | None, epochs: bool, dry_run: bool, force: bool, as_json: bool) -> None:
    """Remove checkpoints of RUN that are not to be kept: old ones, abandoned branches, damaged ones.

    Named checkpoints and the newest two good ones always stay. Nothing goes before enough good ones are there.
    """
    paths, policy = find_run(run), Keep(last=keep, every=every, epochs=epochs)
    life = look_for_life(paths)
    if life.is_alive and not force and not dry_run:
        raise ConfigError(f"{run} is in use: {life.why}. Stop it first, or say --force; --dry-run only looks")
    going = surplus(survey(paths), policy)
    removed, failed = ([], {}) if dry_run else _remove(paths, going)
    if as_json:
        print_json(_document(paths, going, removed, failed, dry_run))
    else:
        _print(run, going, removed, failed, dry_run)
    if failed:
        raise SystemExit(1)


def surplus(found: list[Surveyed], keep: Keep) -> list[tuple[Surveyed, str]]:
    """What may go, with the reason. A named checkpoint stays even if it is damaged: somebody wanted it."""
    items = {item.entry.id: item for item in found}
    going = retention.surplus([item.entry for item in found], keep)
    pairs = [(items[entry.id], reason) for entry, reason in going]
    return [(item, reason) for item, reason in pairs if item.manifest is None or item.manifest.name is None]


def _remove(paths: RunPaths, going: list[tuple[Surveyed, str]]) -> tuple[list[Surveyed], dict[str, str]]:
    logging.getLogger("stepwell").addHandler(logging.NullHandler())  # we tell the person ourselves
    log = journal.EventLog(paths.events, who="cli", lineage=newest_number(paths))
    removed, failed = [], {}
    for item, reason in going:
        directory = item.entry.id.directory
        try:
            retention.remove_checkpoint(item.entry)
        except (OSError, StepwellError) as error:
            failed[directory] = str(error)
            log.emit(events.PruneFailed(directory=directory, error=str(error)))
        else:
            removed.append(item)
            log.emit(events.Prune(directory=directory, reason=f"{reason} (stepwell prune)"))
    log.close()
    return removed, failed


def _print(
    run: str, going: list[tuple[Surveyed, str]], removed: list[Surveyed], failed: dict[str, str], dry_run: bool
) -> None:
    if not going:
        click.echo(f"nothing to remove in {run}")
        return
    for item, reason in going:
        word = "would remove" if dry_run else "removed" if item in removed else "could not remove"
        why = failed.get(item.entry.id.directory, reason)
        print_wrapped(f"{word}  {item.entry.id}  {wording.size(item.nbytes)}  {why}", indent="  ")
    gone = [item for item, _ in going] if dry_run else removed
    total = wording.size(sum(item.nbytes for item in gone))
    verb = "would go" if dry_run else "removed"
    click.echo(f"{wording.count(len(gone), 'checkpoint')} {verb}, {total}")


def _document(
    paths: RunPaths,
    going: list[tuple[Surveyed, str]],
    removed: list[Surveyed],
    failed: dict[str, str],
    dry_run: bool,
) -> dict[str, Any]:
    return {
        "run": str(paths.root),
        "dry_run": dry_run,
        "removed_bytes": sum(item.nbytes for item in removed),
        "checkpoints": [
            {
                "checkpoint": item.entry.id.directory,
                "step": item.entry.id.step,
                "reason": reason,
                "nbytes": item.nbytes,
                "removed": item in removed,
                "error": failed.get(item.entry.id.directory),
            }
            for item, reason in going
        ],
    }
