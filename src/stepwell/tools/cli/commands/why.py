"""`stepwell why`: which checkpoint a restart would use, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from stepwell.events.journal import read_events
from stepwell.restore.preference import NOT_COMMITTED, Ranked, choose
from stepwell.storage.store.lineage import newest_number, read_history
from stepwell.storage.store.nodes_mark import Mark, read_mark
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.chain_reach import Reach, find_reaches
from stepwell.tools.cli.liveness import Life, look_for_life
from stepwell.tools.cli.locate import find_run
from stepwell.tools.cli.output import json_option, print_json, print_wrapped
from stepwell.tools.cli.survey import survey
from stepwell.types import CheckpointId

_WRITING: Final = "it is being written, or writing it fails"
_ENDED: Final = "its process ended before it wrote the manifest"


@dataclass(frozen=True)
class InMemory:
    """The newest complete snapshot that an agent of this machine may hold, by the run's event log."""

    step: int
    agent_pid: int
    is_suspect: bool


@click.command()
@click.argument("run")
@click.option("--before", type=click.IntRange(min=1), help="As restore(before=STEP).")
@click.option("--step", type=click.IntRange(min=0), help="As restore(step=STEP).")
@json_option
def why(run: str, before: int | None, step: int | None, as_json: bool) -> None:
    """Show which checkpoint of RUN a restart would use, and why not the others.

    Checks manifests, records and sizes. A restart also reads every byte, and uses the next fallback if one is wrong;
    `stepwell verify` does the same check.
    """
    paths = find_run(run)
    life = look_for_life(paths)
    choices = explained(paths, life, choose([item.entry for item in survey(paths)], step=step, before=before))
    memory = newest_in_memory(paths, life, step=step, before=before)
    ahead = [] if step is not None or before is not None else _ahead(paths, choices)
    nodes = None if step is not None or before is not None else _on_nodes(paths, choices)
    if as_json:
        told = None if nodes is None else {"checkpoint": nodes.newest.directory, "cache": nodes.cache}
        more = {"chains": [reach.as_document() for reach in ahead], "nodes": told}
        print_json({**_document(paths, choices, memory, life), **more})
        return
    if memory is not None and _is_preferred(memory, choices):
        print_wrapped(_memory_sentence(memory, life), indent="  ")
    chosen = [choice for choice in choices if choice.rank == 0]
    if nodes is not None:
        print_wrapped(_nodes_sentence(nodes), indent="  ")
    elif not chosen:
        print_wrapped(_nothing(run, choices), indent="  ")
    for choice in choices:
        mark = "->" if choice.rank == 0 else "  "
        print_wrapped(f"{mark} {choice.entry.id}  {choice.reason}", indent="     ")
    for reach in ahead:
        when = (
            "restore(prefer='newest') uses it; with deltas=, a restart uses it if more work would be "
            "lost than `worth` allows"
        )
        print_wrapped(f"   {reach.text()}; {when}", indent="     ")
    if life.is_alive:
        print_wrapped(f"in use: {life.why}")


def explained(paths: RunPaths, life: Life, choices: Sequence[Ranked]) -> list[Ranked]:
    """The same, and of what is not committed what became of it, as far as processes and event logs tell."""
    if not any(choice.reason == NOT_COMMITTED for choice in choices):
        return list(choices)
    newest, failures = newest_number(paths), _failures(paths)

    def explain(id: CheckpointId) -> str:
        failure = failures.get((id.lineage, id.step))
        known = None if failure is None else f"writing failed: {failure}"
        if life.is_alive and id.lineage == newest:
            return f"not committed: {known or _WRITING}; {life.why}"
        return f"never committed: {known or _ENDED}"

    return [
        replace(choice, reason=explain(choice.entry.id)) if choice.reason == NOT_COMMITTED else choice
        for choice in choices
    ]


def _failures(paths: RunPaths) -> dict[tuple[int, int], str]:
    """By lineage and step what went wrong last when a checkpoint was written, and what was done about it."""
    found: dict[tuple[int, int], str] = {}
    for rank in paths.ranks():
        for event in read_events(rank.events):
            lineage, step = event.get("lineage"), event.get("step")
            if event["kind"] == "persist-failed" and isinstance(lineage, int) and isinstance(step, int):
                found[lineage, step] = f"{event.get('error')} ({event.get('action')})"
    return found


def _ahead(paths: RunPaths, choices: Sequence[Ranked]) -> list[Reach]:
    """Chains that reach beyond the first choice."""
    best = max((choice.entry.id.step for choice in choices if choice.rank == 0), default=-1)
    return [reach for reach in find_reaches(paths) if reach.step > best]


def _on_nodes(paths: RunPaths, choices: Sequence[Ranked]) -> Mark | None:
    """What was whole on the nodes, if that is newer than the first choice."""
    mark = read_mark(paths)
    if mark is None or not read_history(paths).is_live(mark.newest):
        return None
    best = next((choice.entry.id for choice in choices if choice.rank == 0), None)
    return mark if best is None or best < mark.newest else None


def _nodes_sentence(mark: Mark) -> str:
    where = f" ({mark.cache})" if mark.cache else ""
    return (
        f"step {mark.newest.step} or a newer one is complete in the caches of the run's nodes{where}: "
        "a restart there uses it, and one that does not look there raises an error"
    )


def newest_in_memory(paths: RunPaths, life: Life, *, step: int | None, before: int | None) -> InMemory | None:
    """What a restart on this machine could take over from a listening agent. None if there is no agent.

    The agent itself is not asked: asking it is adopting it.
    """
    if not life.agent_pids:
        return None
    history, suspects = read_history(paths), set()
    newest: dict[int, CheckpointId] = {}
    for rank in paths.ranks():
        for event in read_events(rank.events):
            lineage, at = event.get("lineage"), event.get("step")
            if not isinstance(lineage, int) or not isinstance(at, int):
                continue
            id = CheckpointId(at, 0, lineage)
            if event["kind"] == "suspect":
                suspects.add(id)
            elif event["kind"] == "snapshot" and history.is_live(id):
                newest[rank.rank] = id
    # Ranks that have no agent here, or took no snapshot since the newest start, are of an earlier, larger world.
    last = max((id.lineage for id in newest.values()), default=0)
    held = [id for id in newest.values() if id.lineage == last]
    if not held or len(held) > len(life.agent_pids):
        return None  # a restart takes it from memory only if the parts of all ranks are there
    id = min(held)
    if (step is not None and id.step != step) or (before is not None and id.step >= before):
        return None
    return InMemory(step=id.step, agent_pid=life.agent_pids[-1], is_suspect=id in suspects)


def _is_preferred(memory: InMemory, choices: Sequence[Ranked]) -> bool:
    """Whether a restart would take it rather than the best one on disk. Memory wins at the same step."""
    best = next((choice.entry for choice in choices if choice.rank == 0), None)
    if best is None:
        return True
    suspect_on_disk = best.manifest is not None and best.manifest.suspect is not None
    if memory.is_suspect != suspect_on_disk:
        return suspect_on_disk
    return memory.step >= best.id.step


def _memory_sentence(memory: InMemory, life: Life) -> str:
    holder = f"agent {memory.agent_pid} on this machine holds step {memory.step} in memory"
    if life.trainer_pid is not None:
        return f"{holder}; if its trainer, process {life.trainer_pid}, died now, a restart here would use it"
    return f"{holder}; a restart here uses it instead of the disk, until the agent stops waiting"


def _nothing(run: str, choices: Sequence[Ranked]) -> str:
    if not any(choice.entry.is_committed for choice in choices):
        return f"nothing to restore: a restart in {run} starts fresh"
    return (
        "no checkpoint can be used: restore() would raise an error. restore(step=...) takes an "
        "abandoned one; use another directory to start over"
    )


def _document(paths: RunPaths, choices: Sequence[Ranked], memory: InMemory | None, life: Life) -> dict[str, Any]:
    preferred = memory is not None and _is_preferred(memory, choices)
    return {
        "run": str(paths.root),
        "alive": life.is_alive,
        "chosen": next((choice.entry.id.directory for choice in choices if choice.rank == 0), None),
        "memory": None
        if memory is None
        else {
            "step": memory.step,
            "agent_pid": memory.agent_pid,
            "suspect": memory.is_suspect,
            "preferred": preferred,
        },
        "checkpoints": [
            {
                "checkpoint": choice.entry.id.directory,
                "step": choice.entry.id.step,
                "rank": choice.rank,
                "reason": choice.reason,
            }
            for choice in choices
        ],
    }
