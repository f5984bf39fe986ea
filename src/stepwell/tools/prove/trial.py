"""The sequence of a trial: once uninterrupted, once with kills and restarts, then the comparison.

Owns:    the directory of a trial, and the loop that watches a run and kills it.
Before:  nothing.   After: `proof` judges, `report` draws.
Holds:   whatever happens, no process of the trial outlives it; a kill comes only once a checkpoint was committed, so
         that there is something to resume; each kill lies beyond the one before it.

    DIR/prove.json       the result; marks the directory as one that may be replaced
    DIR/reference/       the uninterrupted run    DIR/reference.log  what the script printed
    DIR/killed/          the killed run      DIR/killed.log
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from stepwell.errors import ConfigError, StepwellError
from stepwell.storage.store import files
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress
from stepwell.tools.prove import trial_facts
from stepwell.tools.prove.command import OWN_STORE, Command
from stepwell.tools.prove.final_states import compare_states, last_checkpoint, why_not_comparable
from stepwell.tools.prove.logged_values import compare_ranks
from stepwell.tools.prove.moments import KillMoment, choose_moments
from stepwell.tools.prove.proof import Failure, Kill, Proof, VoidTrial
from stepwell.tools.prove.rank_facts import Processes, count_ranks, find_agents, find_processes, read_all

_POLL_SECONDS: Final = 0.002
_TAIL_SECONDS: Final = 0.05
_NOTICE_SECONDS: Final = 300.0
"""After the death of one rank the others end, or are ended and started again by their launcher."""
_MARGIN_SECONDS: Final = 0.2  # the last kill keeps this distance from the end, lest the run be over first


class TrialListener(Protocol):
    """Whoever shows a person how the trial goes."""

    def began(self, run: str, steps: int | None) -> None:
        """A run of the script begins; it will have this many steps, if that is known."""
        ...

    def reached(self, step: int) -> None:
        """The run got this far."""
        ...

    def said(self, text: str) -> None:
        """Something happened that deserves a line."""
        ...


@dataclass(frozen=True)
class Trial:
    """What was asked for. Constructing only assigns."""

    words: Sequence[str]
    out: Path
    kills: int
    seed: int
    ignore: Sequence[str]
    listener: TrialListener

    def run(self) -> Proof:
        """Do it all. Blocks for as long as the script takes twice, and its restarts. Raises ConfigError."""
        prepare_directory(self.out)
        proof = Proof(asked=self.kills, seed=self.seed, ignored=self.ignore)
        uninterrupted = _Watch(self, "reference")
        with uninterrupted.command:
            failure = uninterrupted.run([])
        if failure is not None:
            return replace(proof, failure=failure, obstacle="the script fails without any kill")
        steps, ranks = uninterrupted.step, count_ranks(self.out / "reference")
        unset = [] if OWN_STORE in os.environ else [f"{OWN_STORE}=1"]
        proof = replace(proof, steps=steps, ranks=ranks, set_for_it=unset, voids=uninterrupted.voids(ranks))
        proof = replace(proof, bucket=trial_facts.redirected(uninterrupted.tail.lines))
        first = min(trial_facts.committed(uninterrupted.tail.lines).values(), default=None)
        if (obstacle := _why_no_kill(self.out, steps, first)) is not None or first is None:
            return replace(proof, obstacle=obstacle)
        on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
        self.listener.said(f"uninterrupted: {steps} steps{on_ranks}, {uninterrupted.seconds:.1f} s")
        killed = _Watch(self, "killed", ranks)
        with killed.command:
            failure = killed.run(self._moments(uninterrupted, first, steps, ranks), total=steps)
        return self._conclude(proof, uninterrupted, killed, failure)

    def _moments(self, uninterrupted: _Watch, first: int, steps: int, ranks: int) -> list[KillMoment]:
        seconds = trial_facts.seconds_per_step(uninterrupted.tail.lines)
        margin = max(2, min(math.ceil(_MARGIN_SECONDS / max(seconds, 1e-6)), (steps - first) // 4))
        generator = random.Random(self.seed)
        span = {"first": first + 1, "last": steps - margin}
        return choose_moments(self.kills, **span, iteration_seconds=seconds, generator=generator, world_size=ranks)

    def _conclude(self, proof: Proof, uninterrupted: _Watch, killed: _Watch, failure: Failure | None) -> Proof:
        lines = uninterrupted.tail.lines, killed.tail.lines
        proof = replace(
            proof,
            kills=killed.with_resumes(),
            interval=max(map(trial_facts.largest_interval, lines)),
            voids=[*uninterrupted.voids(proof.ranks), *killed.voids(proof.ranks)],
            lineage_steps=trial_facts.starts(killed.tail.lines),
        )
        if failure is not None:
            why = (
                None if killed.kills else "the script failed before the first kill, although it succeeded without kills"
            )
            return replace(proof, failure=failure, obstacle=why)
        logged = [read_all(self.out / name, proof.ranks) for name in ("reference", "killed")]
        logs = compare_ranks(*logged, resumed=proof.lineage_steps, ignore=self.ignore)
        proof = replace(proof, logs=logs)
        try:
            one, two = last_checkpoint(self.out / "reference"), last_checkpoint(self.out / "killed")
            obstacle = why_not_comparable(one, two, same_length=uninterrupted.step == killed.step)
            return replace(proof, obstacle=obstacle, states=None if obstacle else compare_states(one, two))
        except StepwellError as error:
            return replace(proof, obstacle=f"cannot compare the final checkpoints: {error}")


def prepare_directory(out: Path) -> None:
    """Make room for a trial. An earlier trial in the same place is removed; anything else is refused."""
    marker = out / "prove.json"
    if out.exists() and any(out.iterdir()) and not marker.is_file():
        raise ConfigError(f"{out} is not empty and contains no earlier trial; give another directory with --out")
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"verdict": None}) + "\n")  # first: what follows may be removed by the next trial
    for name in ("reference", "killed"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("reference.log", "killed.log", "timeline.png"):
        (out / name).unlink(missing_ok=True)


def _why_no_kill(out: Path, steps: int, first: int | None) -> str | None:
    if not files.exists(RunPaths(out / "reference").run):
        return "the script created no run: it must train with stepwell.Checkpointer"
    if first is None:
        return "the script never committed a checkpoint, so a restart has nothing to resume from"
    if first + 1 > steps - 2:
        return (
            f"the first checkpoint was step {first} of {steps}: no kill could be followed by a resume; "
            "choose a shorter interval, such as Every(steps=...), or train for longer"
        )
    return None


class _Watch:
    """One run of the script, with as many restarts as there are kills."""

    def __init__(self, trial: Trial, name: str, ranks: int = 1) -> None:
        where = trial.out.absolute() / name
        self._name = name
        self._listener = trial.listener
        self._root, self._paths = where, RunPaths(where)
        self._ranks = ranks
        self._lineage = 0  # of the last attempt that was killed
        self._attempts = 1
        self.command = Command(trial.words, where=where, output=trial.out / f"{name}.log")
        self.tail = trial_facts.EventTail(self._paths.events)
        self.kills: list[Kill] = []
        self.resumes: list[trial_facts.Resume] = []  # of each attempt
        self._followed: dict[int, int] = {}  # number of a kill -> the attempt after it
        self.step = 0
        self.seconds = 0.0

    def run(self, moments: Sequence[KillMoment], *, total: int | None = None) -> Failure | None:
        """Start, kill and start again until it ends by itself. Returns its failure, if it failed."""
        began = time.monotonic()
        self._listener.began(self._name, total)
        is_running = False
        for moment in [*moments, None]:
            if not is_running:
                self.command.start()
            status = self._attend(moment)
            if status is not None:
                self._read_tail()
                self.seconds = time.monotonic() - began
                return None if status == 0 else Failure(self._name, len(self.kills), status, self.command.last_lines())
            assert moment is not None
            is_running = not moment.ends_the_attempt or (moment.victim == "rank" and self._is_started_again())
        raise AssertionError("an attempt without a kill ends by itself")

    def _attend(self, moment: KillMoment | None) -> int | None:
        """Watch one attempt until it ends (its exit status) or is killed (None)."""
        next_tail = 0.0
        while (status := self.command.poll()) is None:
            progress = read_progress(self._paths.progress)
            if progress is not None and progress.lineage > self._lineage:
                self._reach(progress.step)
                if moment is not None and progress.step >= moment.step and self._kill(moment):
                    return None
            if time.monotonic() >= next_tail:
                next_tail = time.monotonic() + _TAIL_SECONDS
                self._read_tail()
            time.sleep(_POLL_SECONDS if moment is not None else _TAIL_SECONDS)
        if (progress := read_progress(self._paths.progress)) is not None:
            self._reach(progress.step)
        return status

    def _reach(self, step: int) -> None:
        self.step = step
        self._listener.reached(step)

    def _read_tail(self) -> None:
        """Follow the events, and say so once the attempt has resumed."""
        self.tail.read()
        if len(self.resumes) >= self._attempts:
            return
        resume = trial_facts.find_resume(self.tail.lines, after=self._lineage)
        if resume is not None:
            self.resumes.append(resume)
            if self._attempts > 1:
                how = "began fresh" if resume.source is None else f"resumed at step {resume.step} from {resume.source}"
                self._listener.said(f"  {how}")

    def _kill(self, moment: KillMoment) -> bool:
        """Kill now, unless there is nothing to resume from yet, or the run is over. Both are seen again soon."""
        self._read_tail()
        if not trial_facts.committed(self.tail.lines) or len(self.resumes) < self._attempts:
            return False
        time.sleep(moment.delay_seconds)
        before = self._processes()
        killed_at = time.time()
        if before is None or not self._strike(moment, before):
            return False
        last = self._processes() or before
        number = len(self.kills) + 1
        if moment.ends_the_attempt:
            self._lineage = before.lineage
            self._followed[number] = self._attempts
            self._attempts += 1
        self.kills.append(Kill(number, killed_at, last.step, moment.label, is_restart=moment.ends_the_attempt))
        self._listener.said(f"kill {number}: {moment.label}, at step {last.step}")
        return True

    def _processes(self) -> Processes | None:
        return find_processes(self._root, self._ranks, after=self._lineage)

    def _strike(self, moment: KillMoment, found: Processes) -> bool:
        """Kill whom the moment names. False: somebody was gone already."""
        if moment.victim in ("rank", "agent"):
            one = found.ranks[moment.rank]
            return self.command.strike([one.pid if moment.victim == "rank" else one.agent_pid])
        if moment.victim == "trainer":
            return self.command.kill(found.trainers, spare=found.agents)
        return self.command.kill([*found.agents, *found.trainers], spare=[])

    def _is_started_again(self) -> bool:
        """One rank is dead. Wait until its launcher has started all again (True), or everything has ended."""
        agents = find_agents(self._root, self._ranks)
        deadline = time.monotonic() + _NOTICE_SECONDS
        while self.command.poll() is None:
            if self._processes() is not None:
                self._listener.said("  its launcher restarted all ranks")
                return True
            if time.monotonic() > deadline:
                self._listener.said(f"  no other process noticed within {_NOTICE_SECONDS:.0f} s: prove ends the others")
                break
            time.sleep(_TAIL_SECONDS)
        self.command.finish(spare=agents | find_agents(self._root, self._ranks))
        return False

    def with_resumes(self) -> list[Kill]:
        """The kills, each with the restart that followed it."""
        committed = trial_facts.committed(self.tail.lines)
        resumes = {
            number: self.resumes[attempt] for number, attempt in self._followed.items() if attempt < len(self.resumes)
        }
        return [
            replace(
                kill,
                resumed=resume.step,
                source=resume.source,
                was_committed=resume.source == "disk" or resume.directory in committed,
            )
            if (resume := resumes.get(kill.number)) is not None
            else kill
            for kill in self.kills
        ]

    def voids(self, ranks: int) -> list[VoidTrial]:
        """Snapshots that the ranks of this run threw away."""
        return [
            VoidTrial(self._name, event["step"], event["leaf"], event["seen_by"])
            for lines in read_all(self._root, ranks)
            for event in trial_facts.voided(lines)
        ]
