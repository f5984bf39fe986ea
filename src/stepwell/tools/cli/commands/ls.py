"""`stepwell ls`: the checkpoints of a run, newest first."""

from __future__ import annotations

from typing import Any

import click

from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.tools.cli.chain_reach import Reach, find_reaches, lossy_starts
from stepwell.tools.cli.liveness import Life, look_for_life
from stepwell.tools.cli.locate import find_run
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, print_wrapped, say
from stepwell.tools.cli.survey import Surveyed, survey

_COLUMNS = (
    Column("checkpoint", gives_way=2),
    Column("step", right=True),
    Column("lineage", right=True, gives_way=1),
    Column("branch"),
    Column("size", right=True),
    Column("age", right=True),
    Column("flags"),
)


@click.command()
@click.argument("run")
@json_option
def ls(run: str, as_json: bool) -> None:
    """List the checkpoints of RUN, newest first.

    Branch is "live" for those a restart may use, "abandoned" for those that were left behind by going back to an
    earlier step. Damage is seen here only by sizes and by the small files; `stepwell verify` reads everything.
    """
    paths = find_run(run)
    found, life, reaches = survey(paths), look_for_life(paths), find_reaches(paths)
    if as_json:
        print_json(_document(paths, found, life, reaches))
        return
    if not found:
        say(f"no checkpoints in {run} yet")
    else:
        print_table(_COLUMNS, [_row(item) for item in found])
    for reach in reaches:
        print_wrapped(reach.text(), indent="  ")
    for start in lossy_starts(paths):
        print_wrapped(f"lineage {start.number} continued from a lossy step {start.step}: {start.lossy}", indent="  ")
    if life.is_alive:
        print_wrapped(f"in use: {life.why}")


def _row(item: Surveyed) -> list[str]:
    id = item.entry.id
    return [
        id.directory,
        str(id.step),
        str(id.lineage),
        item.branch,
        wording.size(item.nbytes),
        wording.age(item.created),
        ", ".join(item.flags),
    ]


def _document(paths: RunPaths, found: list[Surveyed], life: Life, reaches: list[Reach]) -> dict[str, Any]:
    return {
        "run": str(paths.root),
        "alive": life.is_alive,
        "trainer_pid": life.trainer_pid,
        "trainer_pids": list(life.trainer_pids),
        "agent_pids": list(life.agent_pids),
        "checkpoints": [as_document(item) for item in found],
        "chains": [reach.as_document() for reach in reaches],
        "lossy_lineages": [start.number for start in lossy_starts(paths)],
    }


def as_document(item: Surveyed) -> dict[str, Any]:
    """One checkpoint for a script; the same keys whatever its state."""
    id, manifest = item.entry.id, item.manifest
    return {
        "checkpoint": id.directory,
        "step": id.step,
        "repeat": id.repeat,
        "lineage": id.lineage,
        "live": item.entry.is_live,
        "committed": item.entry.is_committed,
        "damage": item.entry.damage,
        "void": item.entry.void,
        "world_size": None if manifest is None else manifest.world_size,
        "nbytes": item.nbytes,
        "created": wording.stamp(item.created),
        "suspect": None if manifest is None else manifest.suspect,
        "epoch_end": manifest is not None and manifest.epoch_end,
        "finished": manifest is not None and manifest.finished,
        "name": None if manifest is None else manifest.name,
        "exact": manifest is None or manifest.exact,
    }
