"""`stepwell prune`: retention by hand, for a run that no process uses.

Holds:   prune keeps what the run's own keep= keeps, unless an option overrides it: by default it removes nothing that
         training would keep.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from stepwell.errors import ConfigError, DamagedError, StepwellError
from stepwell.events import journal, run_events
from stepwell.storage.store import retention
from stepwell.storage.store.lineage import newest_number, recorded_keep
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.liveness import look_for_life
from stepwell.tools.cli.locate import find_run, held
from stepwell.tools.cli.output import json_option, print_json, print_wrapped, say
from stepwell.tools.cli.survey import Surveyed, survey
from stepwell.types import Keep


@click.command()
@click.argument("run")
@click.option("--keep", "--last", type=int, metavar="N", help="Keep the newest N good checkpoints (at least 2).")
@click.option(
    "--every",
    type=click.IntRange(min=0),
    metavar="N",
    help="Also keep steps that are a multiple of N; 0: none.",
)
@click.option("--epochs/--no-epochs", default=None, help="Also keep end-of-epoch checkpoints.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("--force", is_flag=True, help="Remove even while a process uses the run.")
@json_option
def prune(
    run: str, keep: int | None, every: int | None, epochs: bool | None, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Remove old and damaged checkpoints and abandoned branches of RUN.

    By default, prune keeps what keep= of the run's last start keeps; --keep, --every and --epochs each override one
    part of it. A run of an older version did not record keep=: prune then keeps the newest two.

    Named checkpoints and the newest two good ones always stay. Nothing is removed until enough good checkpoints exist.
    """
    paths = find_run(run)
    wanted = _choose(paths, keep, every, epochs)
    life = look_for_life(paths)
    if life.is_alive and not force and not dry_run:
        raise ConfigError(
            f"{run} is in use: {life.why}. Stop it first, or use --force; --dry-run only shows what would be removed"
        )
    with held(paths):
        going = surplus(survey(paths), wanted.keep)
        removed, failed = ([], {}) if dry_run else _remove(paths, going)
    if as_json:
        print_json(_document(paths, wanted, going, removed, failed, dry_run))
    else:
        print_wrapped(wanted.explain(), indent="  ")
        _print(run, going, removed, failed, dry_run)
    if failed:
        raise SystemExit(1)


@dataclass(frozen=True)
class _Wanted:
    """What to keep: the keep= of the run, if it is known, with the overrides of the options."""

    keep: Keep
    recorded: Keep | None

    def explain(self) -> str:
        """A sentence for the person who is about to remove something."""
        if self.recorded is None:
            said = "" if self.keep != Keep() else ", the default"
            return f"keeps {_name(self.keep)}{said}: this run did not record its keep= (older version)"
        if self.keep == self.recorded:
            return f"keeps {_name(self.keep)}, as the run does"
        return f"keeps {_name(self.keep)}; the run itself keeps {_name(self.recorded)}"


def _choose(paths: RunPaths, last: int | None, every: int | None, epochs: bool | None) -> _Wanted:
    """Raises ConfigError. A lineage that cannot be read makes nothing live, so nothing goes either."""
    try:
        recorded = recorded_keep(paths)
    except DamagedError:
        recorded = None
    keep = Keep() if recorded is None else recorded
    given = {"last": last, "every": every, "epochs": epochs}
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return _Wanted(replace(keep, **(said | ({"every": None} if every == 0 else {}))), recorded)


def _name(keep: Keep) -> str:
    parts = [f"the newest {keep.last}"]
    parts += [] if keep.every is None else [f"each step that is a multiple of {keep.every}"]
    parts += ["the end of each epoch"] if keep.epochs else []
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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
            retention.remove_checkpoint(item.entry.id, item.entry.path)
        except (OSError, StepwellError) as error:
            failed[directory] = str(error)
            log.emit(run_events.PruneFailed(directory=directory, error=str(error)))
        else:
            removed.append(item)
            log.emit(run_events.Prune(directory=directory, reason=f"{reason} (stepwell prune)"))
    log.close()
    return removed, failed


def _print(
    run: str, going: list[tuple[Surveyed, str]], removed: list[Surveyed], failed: dict[str, str], dry_run: bool
) -> None:
    if not going:
        say(f"nothing to remove in {run}")
        return
    for item, reason in going:
        word = "would remove" if dry_run else "removed" if item in removed else "could not remove"
        why = failed.get(item.entry.id.directory, reason)
        print_wrapped(f"{word}  {item.entry.id}  {wording.size(item.nbytes)}  {why}", indent="  ")
    gone = [item for item, _ in going] if dry_run else removed
    total = wording.size(sum(item.nbytes for item in gone))
    verb = "would go" if dry_run else "removed"
    say(f"{wording.count(len(gone), 'checkpoint')} {verb}, {total}")


def _document(
    paths: RunPaths,
    wanted: _Wanted,
    going: list[tuple[Surveyed, str]],
    removed: list[Surveyed],
    failed: dict[str, str],
    dry_run: bool,
) -> dict[str, Any]:
    return {
        "run": str(paths.root),
        "keep": asdict(wanted.keep),
        "keep_of_run": None if wanted.recorded is None else asdict(wanted.recorded),
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
