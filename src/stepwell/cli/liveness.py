"""Whether anybody still works on a run.

Owns:    the judgement that `clean` and `prune` stand on.
Holds:   in doubt a run is alive. It is dead only if its trainer is known to be gone (same boot, same container) or
         nothing was written for two minutes (the agent touches the progress file every 15 s), and no agent listens.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.arena.channel import find_agents, place
from stepwell.cli import wording
from stepwell.errors import DamagedError
from stepwell.store.lineage import read_run
from stepwell.store.paths import RunPaths
from stepwell.store.progress import Progress, read_progress

QUIET_SECONDS: Final = 120.0
"""A run on another machine that wrote nothing for so long counts as dead."""
_CLOCK_SLACK_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Life:
    """What is known. `why` is a clause for a person: "its trainer, process 7, is running"."""

    is_alive: bool
    why: str
    trainer_pid: int | None
    agent_pids: tuple[int, ...]
    step: int | None
    is_here: bool


def look_for_life(paths: RunPaths) -> Life:
    """Read the progress file, the process table and the table of listening agents. Changes nothing."""
    progress = read_progress(paths.progress)
    agents = listening_agents(paths)
    is_here = progress is not None and progress.is_here()
    trainer = progress.pid if progress is not None and is_here and _is_trainer(progress, paths) else None
    step = None if progress is None else progress.step
    quiet = _quiet_seconds(paths)
    if trainer is not None:
        return Life(True, f"its trainer, process {trainer}, is running (step {step})", trainer, agents, step, True)
    if agents:
        pids = ", ".join(str(pid) for pid in agents)
        why = f"its agent, process {pids}, still holds memory for a successor"
        return Life(True, why, None, agents, step, is_here)
    if not is_here and quiet < QUIET_SECONDS:
        where = "by a process that is not known" if progress is None else "from another machine or container"
        why = f"written to {wording.span(quiet)} ago {where}"
        return Life(True, why, None, (), step, False)
    return Life(False, "no process works on it", None, (), step, is_here)


def listening_agents(paths: RunPaths) -> tuple[int, ...]:
    """Processes of agents of this run on this machine; the last part of an agent's address is its pid."""
    try:
        run = read_run(paths).id
    except DamagedError:
        return ()
    return tuple(int(address.rpartition("/")[2]) for address in find_agents(place(run, paths.root), 0))


def is_process_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = _stat(pid)
    return stat is None or stat[0] not in "ZX"


def _is_trainer(progress: Progress, paths: RunPaths) -> bool:
    """Whether the process is still the one that wrote the file, not a later one with the same number.

    A process that began after the trainer opened the run is a later one; unless the clock was set meanwhile, which a
    fresh file gives away.
    """
    if not is_process_alive(progress.pid):
        return False
    began = _began(progress.pid)
    return began is None or began <= progress.started + _CLOCK_SLACK_SECONDS or _quiet_seconds(paths) < QUIET_SECONDS


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on. The name before it may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _began(pid: int) -> float | None:
    """When a process began, by the wall clock."""
    stat = _stat(pid)
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if stat is not None and line.startswith("btime "):
                return int(line.split()[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        pass
    return None


def _quiet_seconds(paths: RunPaths) -> float:
    """Seconds since anybody wrote to the run. A time in the future (clocks differ) counts as now."""
    newest = 0.0
    for path in (paths.progress, paths.events, paths.run, paths.lineages):
        with contextlib.suppress(OSError):
            newest = max(newest, os.lstat(path).st_mtime)
    return max(0.0, time.time() - newest)
