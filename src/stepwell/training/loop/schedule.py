"""When: the policies, what they look at, and what the run learns about itself.

Owns:    the cadences, the profile of iterations and checkpoints, the automatic interval, and the run's history.
Not:     taking a checkpoint (checkpointer), the formula and the measuring themselves (policy).
Holds:   nothing here waits. What other threads say is noted down and looked at by the training thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

from stepwell.events import journal, run_events
from stepwell.ranks.agreement import Action
from stepwell.storage.store import mirror
from stepwell.storage.store.learned import FAILED, RUNNING, HistoryFile, Learned, age_of_this_process
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.training.cuda.ticks import Ticks, device_name
from stepwell.training.policy.auto import Auto, Tempo, sentence
from stepwell.training.policy.every import Cadence, Elsewhere, Never, Policy, follow, is_counted, tell
from stepwell.training.policy.interval import Interval
from stepwell.training.policy.profile import Profile
from stepwell.training.state.flatten import Flat
from stepwell.types import Owner

_EARLY: Final = 16
_NEWS: Final = 2.0
"""By how much the interval has to change for a line on the terminal."""
_HUNG, _HUNG_SECONDS = 10.0, 60.0
"""A write that takes so many times as long as usual, and so long, holds the next checkpoint back no more."""
_NOTE_SECONDS: Final = 10.0
"""How old the note of this process's life may be: so much of it a SIGKILL takes out of the mean time to failure."""


@dataclass
class _Life:
    """A checkpoint between its trigger and its commit."""

    started: float
    is_asked: bool


@dataclass
class _Iteration:
    """What has to be known of an iteration beside its duration."""

    stall: float
    is_busy: bool
    ended: list[tuple[float, bool]]


class Schedule:
    """Answers "now?" after every step. Constructing only assigns."""

    def __init__(
        self, paths: RunPaths, owner: Owner, policy: Policy, memory: Policy | None, log: journal.EventLog
    ) -> None:
        self._paths, self._owner, self._policy, self._log = paths, owner, policy, log
        self._disk, self._memory = Cadence(policy), Cadence(memory or Never())
        self._profile = Profile()
        self._tempo = Tempo(policy, self._profile) if isinstance(policy, Auto) and owner.is_leader else None
        self._ticks: Ticks[_Iteration] = Ticks()
        self._file = HistoryFile(paths.history, log.later)
        self._history = Learned()
        self._opened = self._noted = 0.0
        self._stall = 0.0
        self._lives: dict[int, _Life] = {}
        self._ended: deque[tuple[float, bool]] = deque()
        self._early: deque[int] = deque(maxlen=_EARLY)
        self._lock = threading.Lock()
        self._is_known = self._is_first_step = False
        self._told = 0.0

    # -- the run ------------------------------------------------------------------------------------------------------

    def open(self, *, is_restart: bool) -> None:
        """The run is ours."""
        self._opened = time.monotonic()
        self._is_first_step = is_restart
        if not self._owner.is_leader:
            return  # one history for all ranks
        with contextlib.suppress(OSError):  # learned again
            self._history = self._file.open().next()
        self._file.update(self._history)

    def know(self, flat: Flat, step: int) -> None:
        """The state is known: what an earlier process measured holds, if it is the same on the same machine."""
        if self._is_known:
            return
        self._is_known = True
        here, history = _conditions(flat, self._paths, self._owner), self._history
        was = history.measured_on
        self._history = replace(history, measured_on=here)
        if history.checkpoint is None or history.durable is None:
            return
        changed = sorted(key for key in {*was, *here} if was.get(key) != here.get(key))
        if changed:
            self._history = replace(self._history, checkpoint=None, durable=None)
            self._log.emit(run_events.MeasureAgain(changed=changed))
        else:
            self._profile.remember(checkpoint=history.checkpoint, durable=history.durable)
            if self._tempo is not None:
                self._decide(self._tempo, step)

    def close(self, how: str) -> None:
        """The process leaves; see `store.history` for how it may. The first word counts."""
        if self._history.ended == RUNNING:
            self._write(ended=how)

    def close_after(self, kind: type[BaseException] | None) -> None:
        """The process ends with this exception, if any: an error is a failure, Ctrl-C is not."""
        if kind is not None and issubclass(kind, Exception):
            self.close(FAILED)

    def release(self) -> None:
        """The writing thread has ended: what a run in a bucket wrote on this machine goes there too."""
        self._file.close()
        mirror.publish(self._paths, {}, is_last=True)

    def _write(self, **changes: str) -> None:
        checkpoint, durable = self._profile.checkpoint, self._profile.durable
        self._noted = time.monotonic()
        self._history = replace(
            self._history,
            seconds=self._noted - self._opened,
            checkpoint=checkpoint if self._is_known else self._history.checkpoint,
            durable=durable if self._is_known else self._history.durable,
            **changes,  # type: ignore[arg-type]
        )
        self._file.update(self._history)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """The training thread waited for us."""
        self._stall += seconds

    def end_iteration(self, step: int) -> tuple[float, float] | None:
        """A step is done. Returns what checkpoints cost, when that was measured anew."""
        if self._is_first_step:
            self._is_first_step = False
            self._history = replace(self._history, restart=age_of_this_process())
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
            note = _Iteration(self._stall, bool(self._lives or ended), ended)
        self._stall = 0.0
        for seconds, iteration in self._ticks.tick(note):
            self._profile.note_iteration(seconds, stall=iteration.stall, is_busy=iteration.is_busy)
            for taken, is_asked in iteration.ended:
                self._profile.note_checkpoint(taken, is_odd=is_asked)
        if ended or time.monotonic() >= self._noted + _NOTE_SECONDS:
            self._write()
        if self._tempo is not None and self._tempo.has_news:
            self._decide(self._tempo, step)
        checkpoint, durable = self._profile.checkpoint, self._profile.durable
        return (checkpoint, durable) if ended and checkpoint is not None and durable is not None else None

    def note_others(self, rank: int, costs: tuple[float, float]) -> None:
        """What checkpoints cost another rank: the interval follows the slowest. Any thread."""
        self._profile.note_others(rank, *costs)

    def _decide(self, tempo: Tempo, step: int) -> None:
        history = replace(self._history, seconds=time.monotonic() - self._opened)
        assert isinstance(self._policy, Auto)
        mtbf, restart = history.mtbf(self._policy.mtbf), history.restart or 0.0
        found = tempo.decide(mtbf=mtbf, restart=restart)
        if found is None:
            return
        is_news = not self._told or not self._told / _NEWS < found.seconds < self._told * _NEWS
        self._log.emit(self._decision(tempo, found, step, is_news=is_news))
        if found.problem and is_news:
            self._log.emit(run_events.Infeasible(step=step, problem=found.problem))
        self._told = found.seconds if is_news else self._told

    def _decision(self, tempo: Tempo, found: Interval, step: int, *, is_news: bool) -> run_events.Decision:
        costs, iteration = tempo.costs, self._profile.iteration
        assert costs is not None and isinstance(self._policy, Auto)
        return run_events.Decision(
            step=step,
            seconds=found.seconds,
            term=found.term,
            predicted_overhead=found.overhead,
            at_risk_seconds=found.at_risk,
            iteration_seconds=iteration,
            checkpoint_seconds=costs.checkpoint,
            durable_seconds=costs.durable,
            restart_seconds=costs.restart,
            mtbf_seconds=costs.mtbf,
            overhead_bound=self._policy.overhead,
            recovery_point=self._policy.recovery_point,
            sentence=sentence(found, costs, bound=self._policy.overhead, iteration=iteration),
            is_news=is_news,
        )

    def count_epoch(self) -> None:
        """Another epoch began: what passed since the last step was no iteration."""
        self._ticks.skip()
        self._disk.begin_epoch()
        self._memory.begin_epoch()

    def wishes(self, step: int, *, is_epoch_end: bool, again: bool) -> tuple[set[Action], list[Action]]:
        """What is due: what all ranks find alike by counting, and what has to be planned by one of them.

        again:  the last one came to nothing
        """
        sure: set[Action] = set()
        wished = [Action.SAVE] if again else []
        if self._is_due(step, is_epoch_end=is_epoch_end):
            (sure.add if is_counted(self._policy) else wished.append)(Action.SAVE)
        if Action.SAVE not in sure and self._memory.is_due(step, is_epoch_end=is_epoch_end):
            (sure.add if is_counted(self._memory.policy) else wished.append)(Action.MEMORY)
            if Action.MEMORY in sure and not self._owner.is_alone:
                self._memory.restart(step)  # also if a save takes its place here, of which another rank has not heard
        return sure, wished

    def due_at_epoch_end(self, step: int) -> list[Action]:
        """What is due only because an epoch is over, and all ranks know that by themselves."""
        found = []
        if is_counted(self._policy) or self._owner.is_alone:
            now, else_ = (self._is_due(step, is_epoch_end=is_end) for is_end in (True, False))
            found += [Action.SAVE] if now and not else_ else []
        if not found and (is_counted(self._memory.policy) or self._owner.is_alone):
            now, else_ = (self._memory.is_due(step, is_epoch_end=is_end) for is_end in (True, False))
            found += [Action.MEMORY] if now and not else_ else []
        return found

    def _is_due(self, step: int, *, is_epoch_end: bool) -> bool:
        if self._tempo is None:
            return self._disk.is_due(step, is_epoch_end=is_epoch_end)
        if self._tempo.chosen is None and self._lives:
            return False  # the first one is being measured
        interval = self._tempo.interval(is_writing=self._is_writing)
        return self._disk.is_due(step, is_epoch_end=is_epoch_end, interval=interval)

    @property
    def _is_writing(self) -> bool:
        """Whether one is not durable yet, and not hung either."""
        if not self._lives:
            return False
        begun = time.monotonic() - max(_HUNG_SECONDS, _HUNG * (self._profile.durable or 0.0))
        with self._lock:
            return any(life.started > begun for life in self._lives.values())

    def is_held(self, step: int) -> bool:
        """Whether an automatic checkpoint is late because the one before is not durable yet."""
        if self._tempo is None or not self._lives:
            return False
        return self._disk.is_due(step, is_epoch_end=False, interval=self._tempo.usual)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def is_counted(self) -> bool:
        """Whether the policy looks at steps and epochs alone, so that all ranks find the same."""
        return is_counted(self._policy)

    @property
    def step(self) -> int:
        """Of the last checkpoint that was begun."""
        return self._disk.step

    def restart(self, step: int, *, durable: bool, is_apart: bool = False, is_epoch_end: bool = False) -> None:
        """There is a snapshot of this step, or it was given up: count from here.

        is_apart:  another rank may not know of it, because it heard of a plan too late, or nobody called save() there:
                   what all ranks count by themselves goes on, or they would count apart from then on
        """
        for cadence in (self._memory, self._disk) if durable else (self._memory,):
            if not (is_apart and is_counted(cadence.policy)):
                cadence.restart(step, is_epoch_end=is_epoch_end)

    def begin(self, sequence: int, started: float, *, is_asked: bool) -> None:
        """A checkpoint is under way; `is_asked`: the user wanted it now, and waits for more than usual."""
        with self._lock:
            if sequence not in self._early:  # a fast agent may have been here before
                self._lives[sequence] = _Life(started, is_asked)
        if self._tempo is not None:
            self._tempo.begin()

    def end(self, sequence: int, is_durable: bool) -> None:
        """It is committed, or came to nothing. Any thread."""
        with self._lock:
            life = self._lives.pop(sequence, None)
            if life is not None:
                self._ended.append((time.monotonic() - life.started, life.is_asked or not is_durable))
            else:
                self._early.append(sequence)

    def expected_seconds(self) -> float | None:
        """How long a checkpoint takes to become durable, as far as that is known."""
        return self._profile.durable

    def explain(self) -> str:
        """The present frequency, and why, in one sentence."""
        if self._tempo is not None:
            return self._tempo.explain()
        return "Rank 0 decides." if isinstance(self._policy, Auto | Elsewhere) else f"{self._policy}, as asked for."

    def policies(self) -> list[Any]:
        """What this rank was given, for checkpoints and for copies in memory."""
        return [tell(self._policy), tell(self._memory.policy)]

    def follow(self, policies: list[Any]) -> None:
        """This rank was given something else than rank 0: rank 0's holds. Before the first step."""
        self._policy, memory = (follow(told) for told in policies)
        self._disk, self._memory = Cadence(self._policy), Cadence(memory)


def _conditions(flat: Flat, paths: RunPaths, owner: Owner) -> dict[str, str]:
    """What the cost of a checkpoint depends on."""
    shapes = hashlib.blake2b(digest_size=8)
    for leaf in flat.leaves:
        shapes.update(
            f"{leaf.name} {tuple(leaf.tensor.shape)} {leaf.tensor.dtype} {leaf.tensor.device.type}\n".encode()
        )
    return {
        "device": device_name(),
        "state": shapes.hexdigest(),
        "storage": _storage(paths),
        "world size": str(owner.world_size),
    }


def _storage(paths: RunPaths) -> str:
    if isinstance(paths.root, ObjectPath):
        return str(paths.root)
    return f"{os.uname().nodename}:{os.statvfs(paths.root).f_fsid:x}"
