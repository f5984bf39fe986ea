"""Whether anybody still works on a run.

Owns:    the judgement that `clean` and `prune` stand on.
Holds:   in doubt a run is alive. It is dead only if the trainers of all ranks are known to be gone (same boot, same
         container) or nothing was written for two minutes (agents touch the progress files every 15 s), and no agent
         of any rank listens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError, DamagedError, StorageError
from stepwell.handover.agent_address import find_pids
from stepwell.handover.find_agents import whereabouts
from stepwell.storage.store import files
from stepwell.storage.store.lineage import read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import Progress, read_progress
from stepwell.tools.cli import wording

QUIET_SECONDS: Final = 120.0
"""A run on another machine that wrote nothing for so long counts as dead."""
_CLOCK_SLACK_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Life:
    """What is known. `why` is a clause for a person: "its trainer, process 7, is running".

    trainer_pid:  of the first rank whose trainer runs here
    is_here:      all ranks were last seen on this machine, in this container
    """

    is_alive: bool
    why: str
    trainer_pid: int | None
    agent_pids: tuple[int, ...]
    step: int | None
    is_here: bool
    trainer_pids: tuple[int, ...] = ()


def look_for_life(paths: RunPaths) -> Life:
    """Read the progress file of each rank, the process table and that of listening agents. Changes nothing."""
    ranks = paths.ranks()
    found = [(rank, progress) for rank in ranks if (progress := read_progress(rank.progress)) is not None]
    agents = listening_agents(paths)
    is_here = bool(found) and all(progress.is_here() for _, progress in found)
    trainers = tuple(
        progress.pid for rank, progress in found if progress.is_here() and _is_trainer(progress, _quiet_seconds([rank]))
    )
    step = max((progress.step for _, progress in found), default=None)
    quiet = _quiet_seconds(ranks)
    if trainers:
        why = f"its {_processes('trainer', trainers)} running (step {step})"
        return Life(True, why, trainers[0], agents, step, is_here, trainers)
    if agents:
        pids = ", ".join(str(pid) for pid in agents)
        who = (
            f"its agent, process {pids}, still holds"
            if len(agents) == 1
            else f"its agents, processes {pids}, still hold"
        )
        return Life(True, f"{who} memory for the next trainer", None, agents, step, is_here)
    if not is_here and quiet < QUIET_SECONDS:
        where = "by a process that is not known" if not found else "by an unknown process"
        why = f"written to {wording.span(quiet)} ago {where}"
        return Life(True, why, None, (), step, False)
    return Life(False, "no process uses it", None, (), step, is_here)


def _processes(what: str, pids: tuple[int, ...]) -> str:
    if len(pids) == 1:
        return f"{what}, process {pids[0]}, is"
    return f"{what}s, processes {', '.join(map(str, pids))}, are"


def listening_agents(paths: RunPaths) -> tuple[int, ...]:
    """Processes of agents of this run on this machine, of all ranks. Those of other users do not count.

    Who may not read the run's secret cannot tell them from others, and knows of none.
    """
    try:
        where = whereabouts(paths, read_run(paths).id, to_look=True)
    except (DamagedError, ConfigError):
        return ()
    return tuple(find_pids(where))


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


def _is_trainer(progress: Progress, quiet: float) -> bool:
    """Whether the process is still the one that wrote the file, not a later one with the same number.

    A process that began after the trainer opened the run is a later one; unless the clock was set meanwhile, which a
    fresh file (`quiet`: seconds since) gives away.
    """
    if not is_process_alive(progress.pid):
        return False
    began = _began(progress.pid)
    return began is None or began <= progress.started + _CLOCK_SLACK_SECONDS or quiet < QUIET_SECONDS


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


def _quiet_seconds(ranks: Sequence[RunPaths]) -> float:
    """Seconds since anybody of these ranks wrote to the run. A time in the future (clocks differ) counts as now."""
    newest = 0.0
    for paths in ranks:
        for path in (paths.progress, paths.events, paths.run, paths.lineages):
            try:
                found = files.facts(path)
            except StorageError:
                raise  # in doubt a run is alive
            except OSError:
                continue
            newest = max(newest, 0.0 if found is None else found.modified)
    return max(0.0, time.time() - newest)
