"""`stepwell clean`: remove leftovers of interrupted saves.

Owns:    what counts as a leftover (temporary files, directories without a manifest) and the order of the checks.
Holds:   a live run loses nothing. clean lists leftovers first, then looks for live processes, then removes only what
         it listed: a trainer that starts in between writes under a new lineage, and so under other names.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any, Final

import click

from stepwell.errors import StepwellError
from stepwell.storage.store import catalog, files, retention
from stepwell.storage.store.objects import Location, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.liveness import QUIET_SECONDS, Life, is_process_alive, look_for_life
from stepwell.tools.cli.locate import find_run, held
from stepwell.tools.cli.output import json_option, print_json, print_wrapped, say

_BY_PROCESS: Final = re.compile(r"\.(\d+)\.tmp$")
_IN_RUN: Final = re.compile(
    r"^(run\.json|storage\.json|nodes\.json|secret)(\.\d+)+\.tmp$|^spare\..+\.l\d+\.tmp$|^events\..*kept\.jsonl\.tmp$"
)
_IN_LINEAGES: Final = re.compile(r"^\d+\.json(\.\d+)+\.tmp$")


@dataclass(frozen=True)
class Leftover:
    """A temporary file, or a directory that never became a checkpoint (`entry`)."""

    path: Location
    nbytes: int
    modified: float
    entry: catalog.Entry | None = None


@dataclass
class Cleaned:
    """The result for one run. `kept`: why the run, or a part of it, was skipped."""

    paths: RunPaths
    removed: list[Leftover] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What it freed, links to files of other checkpoints included."""
        return sum(item.nbytes for item in self.removed)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@json_option
def clean(runs: tuple[str, ...], as_json: bool) -> None:
    """Remove leftovers of interrupted saves from runs that are not active.

    A run is active while its trainer runs, an agent waits for the next trainer, or (seen from another machine) it was
    written to within the last two minutes; clean does not touch active runs.
    """
    found = [find_run(run) for run in runs]  # all of them first: a wrong name must not end half of the work
    results = [clean_run(paths) for paths in found]
    if as_json:
        print_json({"runs": [_document(result) for result in results]})
    else:
        for run, result in zip(runs, results, strict=True):
            _print(run, result)
    if any(result.failed for result in results):
        raise SystemExit(1)


def clean_run(paths: RunPaths) -> Cleaned:
    """Clean one run, unless it is alive."""
    with held(paths):
        return _clean(paths)


def _clean(paths: RunPaths) -> Cleaned:
    result, found = Cleaned(paths), find_leftovers(paths)
    life = look_for_life(paths)  # after listing: see the module's promise
    if life.is_alive:
        result.kept.append(life.why)
        return result
    for item in found:
        if item.entry is not None and files.exists(paths.manifest(item.entry.id)):
            continue  # its agent committed it, as its last act, between listing and looking
        if is_in_use(item, life):
            result.kept.append(f"another process has just written {item.path.name}")
            continue
        try:
            if item.entry is not None:
                retention.remove_directory(item.entry.path)
            else:
                files.remove(item.path)
        except FileNotFoundError:
            continue
        except (OSError, StepwellError) as error:
            result.failed.append(f"{item.path}: {error}")
        else:
            result.removed.append(item)
    return result


def is_in_use(item: Leftover, life: Life) -> bool:
    """Whether a process that has not said so in the progress file yet may be writing this: one that is starting."""
    named = _BY_PROCESS.search(item.path.name)
    if named is not None and is_process_alive(int(named[1])):
        return True
    return not life.is_here and time.time() - item.modified < QUIET_SECONDS


def find_leftovers(paths: RunPaths) -> list[Leftover]:
    """Everything that is not there yet and, if nobody works on the run, never will be. Links are not followed."""
    found = _temporary(paths.root, _IN_RUN) + _temporary(paths.lineages, _IN_LINEAGES)
    for entry in catalog.scan(paths):
        try:
            if not entry.is_committed:
                inside = catalog.directory_facts(entry.path)
                found.append(Leftover(entry.path, inside.nbytes, inside.modified, entry))
            else:
                found += _temporary(entry.path, re.compile(rf"{re.escape(files.TEMPORARY)}$"))
        except FileNotFoundError:
            continue
    return found


def _temporary(directory: Location, name: re.Pattern[str]) -> list[Leftover]:
    if isinstance(directory, ObjectPath) or not files.is_directory(directory):
        return []  # in a bucket nothing has a temporary name
    inside = sorted(files.list_facts(directory).items())
    return [Leftover(directory / file, found.nbytes, found.modified) for file, found in inside if name.search(file)]


def _print(run: str, result: Cleaned) -> None:
    for item in result.removed:
        what = "uncommitted" if item.entry is not None else "temporary"
        where = _inside(item.path, result.paths.root)
        print_wrapped(f"removed  {what}  {where}  {wording.size(item.nbytes)}", indent="  ")
    for problem in result.failed:
        print_wrapped(f"could not remove  {problem}", indent="  ")
    if result.kept and not result.removed and not result.failed:
        print_wrapped(f"{run}: skipped: {'; '.join(result.kept)}", indent="  ")
        return
    for reason in result.kept:
        print_wrapped(f"skipped: {reason}", indent="  ")
    if result.removed:
        say(f"{run}: {wording.count(len(result.removed), 'leftover')} removed, {wording.size(result.nbytes)}")
    elif not result.failed:
        say(f"{run}: nothing to clean")


def _document(result: Cleaned) -> dict[str, Any]:
    root = result.paths.root
    return {
        "run": str(root),
        "removed": [
            {
                "path": _inside(item.path, root),
                "kind": "uncommitted" if item.entry is not None else "temporary",
                "nbytes": item.nbytes,
            }
            for item in result.removed
        ],
        "removed_bytes": result.nbytes,
        "left_alone": result.kept,
        "failed": result.failed,
    }


def _inside(path: Location, root: Location) -> str:
    return str(path).removeprefix(f"{root}/")
