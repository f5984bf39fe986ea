"""`stepwell why`: which checkpoint a restart would use, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from stepwell.events.journal import read_events
from stepwell.restore.preference import NOT_COMMITTED, Ranked, choose, sort_key
from stepwell.storage.store.lineage import newest_number, read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.chain_reach import Reach, find_reaches
from stepwell.tools.cli.liveness import Life, look_for_life
from stepwell.tools.cli.locate import find_run
from stepwell.tools.cli.node_caches import OnNodes, find_on_nodes
from stepwell.tools.cli.output import json_option, print_json, print_wrapped
from stepwell.tools.cli.survey import survey
from stepwell.types import CheckpointId

_WRITING: Final = "it is being written, or writing it fails"
_ENDED: Final = "its process ended before it wrote the manifest"


@dataclass(frozen=True)
class InMemory:
    """The newest complete snapshot that an agent of this machine may hold, by the run's event log."""

    id: CheckpointId
    agent_pid: int
    is_suspect: bool

    @property
    def step(self) -> int:
        return self.id.step


@dataclass(frozen=True)
class Answer:
    """What a restart has to choose from, wherever it lies.

    memory:    None if no agent on this machine holds anything
    nodes:     None if the nodes hold nothing that comes before the first choice in the run's directory
    is_named:  a step, or one before a step, was asked for
    """

    choices: list[Ranked]
    memory: InMemory | None
    nodes: OnNodes | None
    is_named: bool

    @property
    def chosen(self) -> Ranked | None:
        """The first choice in the run's directory."""
        return next((choice for choice in self.choices if choice.rank == 0), None)

    @property
    def is_memory_first(self) -> bool:
        """Whether a restart on this machine takes what is in memory: at the same step the nearest place wins."""
        if self.memory is None:
            return False
        rivals = [] if self.chosen is None else [(self.chosen.entry.id, self.chosen.entry.is_suspect)]
        rivals += [] if self.nodes is None else [(self.nodes.id, self.nodes.is_suspect)]
        mine = _turn(self.memory.id, self.memory.is_suspect)
        return all(mine <= _turn(id, is_suspect) for id, is_suspect in rivals)

    @property
    def is_guarded(self) -> bool:
        """Whether a start that does not look into the caches is refused."""
        guard = None if self.nodes is None or self.is_named else self.nodes.guard
        return guard is not None and (self.chosen is None or self.chosen.entry.id < guard)


def _turn(id: CheckpointId, is_suspect: bool) -> tuple[Any, ...]:
    """`sort_key` without the repeat, which event logs do not tell."""
    return sort_key(id, is_suspect=is_suspect)[:-1]


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
    answer = _answer(paths, life, step, before)
    ahead = [] if answer.is_named else _ahead(paths, answer)
    if as_json:
        print_json({**_document(paths, answer, life), "chains": [reach.as_document() for reach in ahead]})
        return
    if answer.memory is not None and answer.is_memory_first:
        print_wrapped(_memory_sentence(answer.memory, life), indent="  ")
    if answer.nodes is not None:
        print_wrapped(_nodes_sentence(answer.nodes, answer), indent="  ")
    elif answer.chosen is None:
        print_wrapped(_nothing(run, answer.choices), indent="  ")
    for choice in answer.choices:
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


def _answer(paths: RunPaths, life: Life, step: int | None, before: int | None) -> Answer:
    def is_wanted(id: CheckpointId) -> bool:
        return (step is None or id.step == step) and (before is None or id.step < before)

    choices = explained(paths, life, choose([item.entry for item in survey(paths)], step=step, before=before))
    answer = Answer(choices, newest_in_memory(paths, life, is_wanted), None, step is not None or before is not None)
    nodes = find_on_nodes(paths, read_history(paths), is_wanted)
    if nodes is not None and answer.chosen is not None:
        best = answer.chosen.entry
        if sort_key(nodes.id, is_suspect=nodes.is_suspect) >= sort_key(best.id, is_suspect=best.is_suspect):
            nodes = None
    return replace(answer, nodes=nodes)


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


def _ahead(paths: RunPaths, answer: Answer) -> list[Reach]:
    """Chains that reach beyond the first choice."""
    best = -1 if answer.chosen is None else answer.chosen.entry.id.step
    return [reach for reach in find_reaches(paths) if reach.step > best]


def _nodes_sentence(nodes: OnNodes, answer: Answer) -> str:
    where = f" ({nodes.cache})" if nodes.cache else ""
    held = (
        f"step {nodes.id.step} is whole in the cache of this node{where}: a restart here with levels= uses that"
        if nodes.is_here
        else f"step {nodes.id.step} or a newer one is whole in the caches of the run's nodes{where}: a restart there "
        "uses that"
    )
    first = ", if it is not in memory" if answer.is_memory_first else ""
    return f"{held}{first}, and one that does not look there {'raises an error' if answer.is_guarded else 'cannot'}"


def newest_in_memory(paths: RunPaths, life: Life, is_wanted: Callable[[CheckpointId], bool]) -> InMemory | None:
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
    return InMemory(id, life.agent_pids[-1], id in suspects) if is_wanted(id) else None


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


def _document(paths: RunPaths, answer: Answer, life: Life) -> dict[str, Any]:
    memory, chosen, nodes = answer.memory, answer.chosen, answer.nodes
    return {
        "run": str(paths.root),
        "alive": life.is_alive,
        "chosen": None if chosen is None else chosen.entry.id.directory,
        "memory": None
        if memory is None
        else {
            "step": memory.step,
            "agent_pid": memory.agent_pid,
            "suspect": memory.is_suspect,
            "preferred": answer.is_memory_first,
        },
        "nodes": None if nodes is None else {**nodes.as_document(), "preferred": not answer.is_memory_first},
        "checkpoints": [
            {
                "checkpoint": choice.entry.id.directory,
                "step": choice.entry.id.step,
                "rank": choice.rank,
                "reason": choice.reason,
            }
            for choice in answer.choices
        ],
    }
