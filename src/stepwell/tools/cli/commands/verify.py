"""`stepwell verify`: read every byte of a run and compare it with its checksums.

Owns:    which files to read (each inode once, even if several checkpoints link it), and the verdict on each checkpoint.
Holds:   a checkpoint is whole only if its manifest, its records and all bytes of all its files are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from stepwell.errors import ConfigError, DamagedError
from stepwell.events.progress_bar import bar
from stepwell.restore.byte_sources import BlockSource
from stepwell.restore.from_disk import open_file
from stepwell.restore.verified_read import read_file
from stepwell.restore.whole import Part, Whole, check_cover
from stepwell.storage.format.manifest import Lineage
from stepwell.storage.format.record import FileEntry
from stepwell.storage.store import catalog, files
from stepwell.storage.store.lineage import read_history, read_run
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.chain_reach import find_broken
from stepwell.tools.cli.locate import split, step_option
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, print_wrapped, say
from stepwell.types import CheckpointId

_COLUMNS = (Column("checkpoint"), Column("state"), Column("size", right=True, gives_way=1))
_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class FileVerdict:
    """One checkpoint, with one sentence for each damaged file; empty if it is intact."""

    id: CheckpointId
    nbytes: int
    damage: list[str]


@click.command()
@click.argument("run")
@step_option
@json_option
def verify(run: str, step: int | None, as_json: bool) -> None:
    """Read every byte of every checkpoint of RUN and compare it with its checksum.

    Exit code 1 if a checkpoint, or one of the run's own small files, is damaged; the output names the file and the
    range of bytes. Uncommitted files are ignored.
    """
    paths, step, id = split(run, step)
    entries = [
        entry
        for entry in ([catalog.judge(paths, id, read_history(paths))] if id is not None else catalog.scan(paths))
        if entry.is_committed and (step is None or entry.id.step == step)
    ]
    if not entries:
        wanted = "" if step is None else f" of step {step}"
        raise ConfigError(f"{run}: no checkpoint{wanted} to verify; `stepwell ls {paths.root}` shows what is there")
    of_run = [] if id is not None or step is not None else [*_check_run(paths), *find_broken(paths)]
    total = sum(entry.manifest.nbytes for entry in entries if entry.manifest is not None)
    with bar("verifying", total) as progress:
        verdicts = list(_check_all(paths, entries, progress.add))
    damaged = [verdict for verdict in verdicts if verdict.damage]
    if as_json:
        print_json(_document(paths, verdicts, of_run))
    else:
        _print(verdicts, of_run, damaged)
    if damaged or of_run:
        raise SystemExit(1)


def _check_run(paths: RunPaths) -> Iterator[str]:
    """The run's identity and its histories: small, and a restart needs them."""
    try:
        read_run(paths)
    except DamagedError as error:
        yield str(error)
    for name in files.list_names(paths.lineages, follow=True):
        path = paths.lineages / name
        if name.endswith(".json"):
            try:
                Lineage.load(files.get(path), path=str(path))
            except DamagedError as error:
                yield str(error)


def _check_all(paths: RunPaths, entries: list[catalog.Entry], add: Callable[[int], None]) -> Iterator[FileVerdict]:
    known: dict[_Key, str | None] = {}
    for entry in entries:
        verdict = _check(paths, entry, known, add)
        if not verdict.damage or files.exists(paths.manifest(entry.id)):
            yield verdict  # else a live run pruned it while we read: nothing is wrong


def _check(
    paths: RunPaths, entry: catalog.Entry, known: dict[_Key, str | None], add: Callable[[int], None]
) -> FileVerdict:
    manifest = entry.manifest
    if manifest is None:
        return FileVerdict(entry.id, 0, [entry.damage or "no manifest"])
    damage, records = [], []
    for rank in range(manifest.world_size):
        try:
            record = catalog.read_record(paths, manifest, rank)
        except DamagedError as error:
            damage.append(str(error))
            continue
        records.append(record)
        for file in record.files:
            problem = _check_file(paths, entry, file, known, add)
            if problem is not None:
                damage.append(problem)
    if len(records) == manifest.world_size:
        try:
            check_cover(Whole([Part(record, _no_source) for record in records]))
        except DamagedError as error:
            damage.append(f"{entry.path}: {error}")
    return FileVerdict(entry.id, manifest.nbytes, damage)


def _no_source(file: FileEntry) -> BlockSource:
    raise AssertionError(f"{file.name}: checks the records only")


def _check_file(
    paths: RunPaths,
    entry: catalog.Entry,
    file: FileEntry,
    known: dict[_Key, str | None],
    add: Callable[[int], None],
) -> str | None:
    """The damage of a file. A file that several checkpoints link, with the same checksums, is read once."""
    path = entry.path / file.name
    found = files.facts(path)
    if found is None:
        return f"{path}: No such file"
    key = (found.identity or str(path), file.blocks)
    if key in known:
        add(file.nbytes)
        problem = known[key]
        return None if problem is None else f"{path}: shared with a newer checkpoint, and damaged there too"
    known[key] = _read_all(path, file, add)
    return known[key]


def _read_all(path: Location, file: FileEntry, add: Callable[[int], None]) -> str | None:
    try:
        source = open_file(path)
        try:
            read_file(source, file, [], _ignore, check_all=True, on_block=add)
        finally:
            source.close()
    except DamagedError as error:
        return str(error)
    return None


def _ignore(*_: Any) -> None:
    """Discard the bytes; they were checked."""


def _print(verdicts: list[FileVerdict], of_run: list[str], damaged: list[FileVerdict]) -> None:
    print_table(
        _COLUMNS,
        [
            [verdict.id.directory, "damaged" if verdict.damage else "whole", wording.size(verdict.nbytes)]
            for verdict in verdicts
        ],
    )
    for problem in (*of_run, *(problem for verdict in damaged for problem in verdict.damage)):
        print_wrapped(f"damaged: {problem}", indent="  ")
    if damaged:
        whole = len(verdicts) - len(damaged)
        print_wrapped(
            f"{wording.count(len(damaged), 'checkpoint')} damaged, {whole} intact. A restart skips "
            "damaged ones; `stepwell prune` removes them once enough good ones exist."
        )
    elif not of_run:
        total = wording.size(sum(verdict.nbytes for verdict in verdicts))
        say(f"{wording.count(len(verdicts), 'checkpoint')} intact, {total}")


def _document(paths: RunPaths, verdicts: list[FileVerdict], of_run: list[str]) -> dict[str, Any]:
    return {
        "run": str(paths.root),
        "whole": not of_run and not any(verdict.damage for verdict in verdicts),
        "damage": of_run,
        "checkpoints": [
            {
                "checkpoint": verdict.id.directory,
                "step": verdict.id.step,
                "whole": not verdict.damage,
                "nbytes": verdict.nbytes,
                "damage": verdict.damage,
            }
            for verdict in verdicts
        ],
    }
