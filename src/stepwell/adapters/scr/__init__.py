"""SCR's Python interface (`scr.py`): the same 14 functions and 3 flags, over stepwell's levels.

    from stepwell.adapters import scr

    job                 one start of an SCR program: what all its calls share
    parameters          SCR's parameters and what they mean here
    parameter_sources   where they are set, and SCR's rules for it
    dataset_output      writes a dataset
    application_files   the application's files
    restart             resumes from a dataset
    need                whether a checkpoint is due, and whether the job is to stop
    all_caches          the caches of all nodes, as the ranks see them together
    prefix_flush        copies datasets from the caches to the prefix
    prefix_index        what a prefix knows of its datasets
    salvage             the same for caches that no job uses any more

Owns:    the state machine, and how errors reach the program.
Not:     what the calls do (dataset_output, restart, need, job).
Holds:   only `config` may come before `init`; outputs and restarts do not overlap; a call in the wrong place raises
         RuntimeError and changes nothing. Everything but `config` and `route_file` is collective, and gives the same
         answer on all ranks. An error never ends the job: it is raised, as RuntimeError.

`docs/scr.md` compares every call and parameter with SCR's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from stepwell.adapters.scr.dataset_output import Outputs
from stepwell.adapters.scr.job import ScrJob
from stepwell.adapters.scr.need import Need
from stepwell.adapters.scr.parameter_sources import Config, ScrError
from stepwell.adapters.scr.parameters import settle
from stepwell.adapters.scr.prefix_index import CHECKPOINT, OUTPUT
from stepwell.adapters.scr.restart import Restarts
from stepwell.errors import StepwellError
from stepwell.ranks.groups.consent import lead
from stepwell.storage.store import files

__all__ = [
    "FLAG_CHECKPOINT",
    "FLAG_NONE",
    "FLAG_OUTPUT",
    "ScrError",
    "complete_output",
    "complete_restart",
    "config",
    "current",
    "delete",
    "drop",
    "finalize",
    "have_restart",
    "init",
    "need_checkpoint",
    "route_file",
    "should_exit",
    "start_output",
    "start_restart",
]

FLAG_NONE: Final = 0
FLAG_CHECKPOINT: Final = CHECKPOINT
"""The dataset can be restarted from."""
FLAG_OUTPUT: Final = OUTPUT
"""The dataset is a result: it always goes to the prefix."""

UNINIT, IDLE, IN_OUTPUT, IN_RESTART = "before init()", "between phases", "in an output", "in a restart"

P = ParamSpec("P")
R = TypeVar("R")


class _Program:
    """What one start of the program does; exists between `init` and `finalize`."""

    def __init__(self, job: ScrJob) -> None:
        self.job = job
        self.outputs, self.restarts, self.pace = Outputs(job), Restarts(job), Need(job)
        self.state = IDLE


_config = Config()
_program: _Program | None = None


def _in_words(call: Callable[P, R]) -> Callable[P, R]:
    """Errors of ours and of the system, as RuntimeError."""

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ScrError:
            raise
        except (StepwellError, OSError) as error:
            fields = error.fields if isinstance(error, StepwellError) else {}
            raise ScrError(f"{call.__name__}: {error}", **fields) from error

    return guarded


def _require(call: str, *states: str) -> _Program:
    state = UNINIT if _program is None else _program.state
    if _program is None or state not in states:
        raise ScrError(f"{call}() {state}: call it {' or '.join(states)}", call=call, state=state)
    return _program


@_in_words
def config(conf: str | None) -> str | None:
    """Ask for a parameter (`KEY`), or before `init` set (`KEY=VALUE`) or unset (`KEY=`) it. Local.

    None is the answer for a parameter that is set nowhere, whatever its default is, as in SCR.
    """
    return _config.tell(conf, may_set=_program is None)


@_in_words
def init() -> None:
    """Meet the other ranks, look at caches and prefix, go on with flushes that were broken off. Collective."""
    global _program
    if _program is not None:
        raise ScrError(f"init() {_program.state}: it was already called", call="init", state=_program.state)
    if "STEPWELL_PROVE" in os.environ:
        raise ScrError(
            "`stepwell prove` compares states of a Checkpointer; it cannot check files that a program writes "
            "through the SCR interface"
        )
    _program = _Program(ScrJob.open(settle(_config)))


@_in_words
def finalize() -> None:
    """Carry the newest checkpoint to the prefix if it is not there, wait for flushes, leave. Collective."""
    global _program
    program = _require("finalize", IDLE)
    job = program.job
    try:
        newest = job.whole[-1] if job.whole and job.settings.flush and not job.settings.is_bypass else None
        is_open = newest is not None and lead(
            job.group,
            "is the newest one in the prefix",
            lambda: newest not in job.carrier.waiting and not files.exists(job.prefix.paths.manifest(newest)),
        )
        if newest is not None and is_open and newest.lineage == job.lineage:
            job.want_flush(newest)
            job.flush_now(newest)
    finally:
        _program = None
        _config.forget()
        job.close()


@_in_words
def have_restart() -> str | None:
    """The name of the checkpoint to restart from, its files here and verified; None if there is none. Collective."""
    return _require("have_restart", IDLE).restarts.have()


@_in_words
def start_restart() -> str:
    """Begin to read the checkpoint that `have_restart` named; returns its name. Collective."""
    program = _require("start_restart", IDLE)
    if not program.restarts.is_offered:
        raise ScrError("start_restart() without a checkpoint: call it after have_restart() has named one")
    name = program.restarts.start()
    program.state = IN_RESTART
    return name


@_in_words
def complete_restart(valid: bool = True) -> bool:
    """Whether all ranks could read theirs; if not, `have_restart` names the next older one. Collective."""
    program = _require("complete_restart", IN_RESTART)
    program.state = IDLE
    return program.restarts.complete(valid)


@_in_words
def need_checkpoint() -> bool:
    """Whether it is time for a checkpoint. Collective."""
    return _require("need_checkpoint", IDLE).pace.need()


@_in_words
def start_output(name: str, flags: int) -> None:
    """Begin a dataset; the same name and flags on all ranks. Collective."""
    program = _require("start_output", IDLE)
    program.outputs.start(name, flags)
    program.restarts.forget_offer()
    program.state = IN_OUTPUT


@_in_words
def route_file(fname: str | os.PathLike[str]) -> str:
    """Where to write, or to read, the file that the program calls `fname`; outside a phase, `fname` itself. Local."""
    path = os.fspath(fname)
    if not path:
        raise ScrError("route_file(''): give the path of a file", call="route_file")
    if _program is None or _program.state == IDLE:
        return path
    phase = _program.outputs if _program.state == IN_OUTPUT else _program.restarts
    return phase.route(path)


@_in_words
def complete_output(valid: bool = True) -> bool:
    """End a dataset. True: all ranks hold theirs, protected. False: discarded on all; older ones stay. Collective."""
    program = _require("complete_output", IN_OUTPUT)
    program.state = IDLE
    is_whole = program.outputs.complete(valid)
    if is_whole and program.outputs.flags & FLAG_CHECKPOINT:
        program.pace.note(program.outputs.began)
    return is_whole


@_in_words
def should_exit() -> bool:
    """Whether the job is to stop (`stepwell halt`, or the end of its time). Collective."""
    return _require("should_exit", IDLE).pace.should_exit()


@_in_words
def current(name: str) -> None:
    """Say that the program went on from that dataset by itself. Collective."""
    _require("current", IDLE).restarts.current(name)


@_in_words
def delete(name: str) -> None:
    """Remove a dataset and its files, from caches and prefix. Collective."""
    _require("delete", IDLE).restarts.delete(name)


@_in_words
def drop(name: str) -> None:
    """Do not offer a dataset any more; its files stay. Collective."""
    _require("drop", IDLE).restarts.drop(name)
