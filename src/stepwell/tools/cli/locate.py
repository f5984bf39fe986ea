"""Which run, and which checkpoint, a person means.

Owns:    the spellings `RUN`, `RUN@STEP` and a checkpoint's own directory, and the errors when there is no such thing.
Not:     judging what was found (survey).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stepwell.errors import ConfigError, DamagedError
from stepwell.restore.preference import choose_on_disk
from stepwell.restore.whole import Whole, parts_on_disk
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store import catalog, files, mirror, no_follow
from stepwell.storage.store.lineage import read_history
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

F = TypeVar("F", bound=Callable[..., Any])
_MOST_SUGGESTED: Final = 5


@dataclass(frozen=True)
class Located:
    """One checkpoint: its run, its directory entry, and its manifest (readable, or it would not have been found)."""

    paths: RunPaths
    entry: catalog.Entry
    manifest: Manifest

    @property
    def label(self) -> str:
        """How to name it to a person; can be given back to `locate`."""
        return str(self.entry.path)

    def whole(self) -> Whole:
        """All its records as one. Raises DamagedError."""
        return Whole(parts_on_disk(self.paths, self.manifest))


def step_option(command: F) -> F:
    """`--step N`, the same as RUN@N."""
    return click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step; also RUN@STEP.")(
        command
    )


def find_run(text: str) -> RunPaths:
    """The run in a directory. Raises ConfigError that says what is there instead."""
    paths = RunPaths.at(text)
    root = paths.root
    if not (root.is_dir() if isinstance(root, Path) else files.is_directory(root)):
        raise ConfigError(
            f"{text}: no such directory; give the directory that was passed to Checkpointer", path=str(root)
        )
    if not is_run(root):
        below = _runs_below(root)
        advice = f"; it contains these runs: {', '.join(below)}" if below else "; give the run's own directory"
        raise ConfigError(f"{text}: not a run (no run.json, no checkpoint){advice}", path=str(root))
    mirror.fetch(paths, is_reader=True)
    return paths


def held(paths: RunPaths) -> contextlib.AbstractContextManager[None]:
    """Within this the run's directory stays the one that it is: what was listed in it is not removed elsewhere."""
    return contextlib.nullcontext() if not isinstance(paths.root, Path) else no_follow.pinned(paths.root)


def is_run(root: Location) -> bool:
    """Whether a directory was made by a Checkpointer. A run whose run.json is lost still is one."""
    names = files.list_names(root, follow=True)
    paths = RunPaths(root)
    return any(name in (paths.run.name, paths.lineages.name) or CheckpointId.parse(name) is not None for name in names)


def _runs_below(root: Location) -> list[str]:
    names = files.list_names(root, follow=True)
    found = [str(root / name) for name in names if files.exists(root / name / "run.json")]
    return found[:_MOST_SUGGESTED] + (["..."] if len(found) > _MOST_SUGGESTED else [])


def split(text: str, step: int | None) -> tuple[RunPaths, int | None, CheckpointId | None]:
    """The run, and the step or the checkpoint if the text or `--step` names one."""
    run, mark, number = text.rpartition("@")
    if mark and number.isdigit() and not os.path.lexists(text):
        if step is not None and step != int(number):
            raise ConfigError(f"{text} and --step {step} name two steps; drop one of them")
        return find_run(run), int(number), None
    paths = RunPaths.at(text)
    path = paths.root.resolve() if isinstance(paths.root, Path) else paths.root
    id = CheckpointId.parse(path.name) if not isinstance(path, Path) or path.is_dir() else None
    if id is not None:
        if step is not None and step != id.step:
            raise ConfigError(f"{text} and --step {step} name two steps; drop one of them")
        return RunPaths(path.parent), None, id
    return find_run(text), step, None


def locate(text: str, step: int | None = None) -> Located:
    """The checkpoint a person means; of a run without a step, the one a restart would use first.

    Judges by manifest and record, not by the bytes of the shards. Raises ConfigError, or DamagedError for a checkpoint
    that was named and is not whole.
    """
    paths, step, id = split(text, step)
    if id is not None:
        return _checked(paths, catalog.judge(paths, id, read_history(paths)))
    choices = choose_on_disk(paths, step=step)
    problem: DamagedError | None = None
    for choice in choices:
        if choice.rank is None:
            continue
        try:
            return _checked(paths, choice.entry)
        except DamagedError as error:
            problem = problem or error  # the next one, as a restart does
    if problem is not None:
        raise problem
    named = [choice for choice in choices if step is None or choice.entry.id.step == step]
    if named:
        raise ConfigError(f"{named[0].entry.path}: {named[0].reason}; `stepwell ls {paths.root}` shows the others")
    if step is not None:
        steps = ", ".join(str(n) for n in sorted({c.entry.id.step for c in choices if c.entry.is_good})) or "none"
        raise ConfigError(f"{paths.root}: no checkpoint of step {step}; there are: {steps}", step=step)
    raise ConfigError(f"{paths.root}: this run has no checkpoint yet", path=str(paths.root))


def _checked(paths: RunPaths, entry: catalog.Entry) -> Located:
    if entry.damage is not None:
        raise DamagedError(f"{entry.damage}; `stepwell verify {paths.root}` shows which checkpoints are intact")
    if entry.manifest is None:
        raise ConfigError(f"{entry.path}: not committed, so it contains no checkpoint")
    for rank in range(entry.manifest.world_size):
        catalog.read_record(paths, entry.manifest, rank)
    return Located(paths, entry, entry.manifest)
