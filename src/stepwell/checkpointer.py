"""The life of a checkpoint, stage by stage, and the loop around it. The only place that wires the stages together.

    save:     state -> snapshot -> arena -> agent -> store          (`saving`)
    restore:  inventory -> plan -> verified read -> load into state (`restore`, in `reopen`)
    beside:   policy answers "now?" after every step, and all ranks agree on it (`_end_iteration`, `together`)

Holds:   the trigger sits where everything of an iteration is over (the next batch request, or `step()`); the gate
         before every optimizer step is the only wait in the training thread; a failed checkpoint never stops training.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepwell import events, journal, options
from stepwell.agent.client import AgentClient
from stepwell.codecs.spec import Spec
from stepwell.data.batches import Batches
from stepwell.data.steps import StepCounter
from stepwell.errors import ConfigError, PersistError, StateError
from stepwell.leave import Leave, Order
from stepwell.levels.spec import Node, Shared, read_levels
from stepwell.outcome import Outcomes
from stepwell.own import OwnState
from stepwell.pace import Pace
from stepwell.policy.every import Every, Policy
from stepwell.reopen import Reopened, load_only, reopen
from stepwell.saving import Saving
from stepwell.snapshot.snapshotter import Snapshotter
from stepwell.snapshot.uploads import SaveHandle
from stepwell.state.capture import Capture
from stepwell.state.tracked import hook
from stepwell.state.tracked import track as track_objects
from stepwell.store.history import CLOSED, TOLD
from stepwell.store.paths import RunPaths
from stepwell.store.progress import ProgressFile
from stepwell.together import Together
from stepwell.types import Keep, Status

if TYPE_CHECKING:
    from stepwell.codecs.layout import Deltas


class Checkpointer:
    """Keeps a training run from losing more than a few seconds of work. Constructing only assigns."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        overhead: float | None = None,
        policy: Policy | None = None,
        memory: Policy | None = None,
        keep: int | Keep = 2,
        deltas: Spec | Deltas | None = None,
        levels: Sequence[Node | Shared] | None = None,
        data: Any = None,
        seed: int | None = None,
        on_unseekable: str = "error",
        grace: float | None = 25.0,
        notice: Any = None,
        host_memory: int | None = None,
        snapshot: str = "auto",
        verify_snapshots: bool = False,
        track: dict[str, Any] | None = None,
        **tracked: Any,
    ) -> None:
        """Only the directory, or `s3://...`, and the objects (`**tracked`, or `track={}`) have no default.

        overhead:      share of the time that checkpoints may take (0.035); short for policy=Auto(overhead=)
        policy, keep:  when to write a checkpoint, and how many stay
        memory:        when to copy the state into memory only, in between: `Every(steps=1)` is cheap on a GPU. If this
                       process crashes, the newest copy is restored from there, and written to disk
        deltas:        LC(bits=3), or Deltas(...): in between, what changed goes to disk after every step, lossy
        levels:        [Node("/local/cache"), Shared(every=10)]: to each node's own disk, each tenth on from there
        data, seed:    the loader behind `ckpt.data`, and the seed of its order; on_unseekable="replay" reads again
        grace:         seconds to save and be gone after SIGTERM, SIGINT, SIGUSR1 or a notice; None: signals are yours
        notice:        a path that appears, or a function that says True, when the machine is about to go away
        host_memory:   bytes for copies in memory; too few for one of them means blocking saves
        snapshot:      auto, device, overlap or blocking; verify_snapshots hashes every leaf before and after
        """
        given = {"keep": keep, "data": data, "seed": seed, "host_memory": host_memory, "snapshot": snapshot}
        given |= {"grace": grace, "notice": notice, "on_unseekable": on_unseekable, "policy": policy}
        options.check_options(memory=memory, track=track, **given)
        self._together = Together(
            lambda step: self._saving.on_late(step),
            lambda rank, costs: self._pace.note_others(rank, costs),
            lambda: self._leave.take("another rank"),
        )
        place, owner = options.run_place(where), self._together.owner
        self._deltas = options.read_deltas(deltas, place=place, memory=memory, levels=levels, ranks=owner.world_size)
        memory, levels = (memory, levels) if self._deltas is None else (Every(steps=self._deltas.every), [])
        self._paths = RunPaths.at(place, owner.rank)
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._seed, self._levels = seed, read_levels(levels)
        self._tracked = track_objects(options.named_objects(track, tracked))
        self._capture = Capture(self._tracked)
        self._log = self._together.log = journal.EventLog(
            self._paths.events, who="trainer", rank=self._paths.rank, background=True
        )
        self._pace = Pace(self._paths, owner, options.choose_policy(policy, overhead), memory, self._log)
        self._outcomes = Outcomes(self._pace.end, lambda pid: self._progress.update(self._steps.step, agent_pid=pid))
        self._client = AgentClient(self._log, self._outcomes.on_agent)
        self._snapshotter = Snapshotter(
            self._tracked,
            strategy=snapshot,
            verify=verify_snapshots or os.environ.get("STEPWELL_VERIFY") == "1",
            host_memory=host_memory,
            slots=2 if memory is None else 3 if self._deltas is None else 4,
            deltas=self._deltas,
            log=self._log,
            client=self._client,
            on_settled=self._outcomes.on_settled,
        )
        self._outcomes.attach(self._snapshotter)
        self._progress = ProgressFile(self._paths.progress, self._log.later)
        self._steps = StepCounter()
        self._leave = Leave(self._log, lambda: self._steps.step, lambda: self._pace.close(TOLD), grace, notice)
        self._close_seconds = options.seconds_from("STEPWELL_CLOSE_SECONDS", 120)
        loop = self._ensure_open, self._on_request, self._steps.on_delivered
        self.data = Batches(data, *loop, on_unseekable, self._log.emit)
        self._own = OwnState(self._steps, self.data)
        self._pid = os.getpid()
        self._reopened: Reopened | None = None
        self._is_closed = self._may_abandon = self._said_ahead = self._is_failing = False
        stages = self._snapshotter, self._outcomes, self._together, self._client, self._log
        self._saving = Saving(self._capture, self._own, self._steps, self.data, self._pace, *stages)
        self._hooks = hook(self._tracked, self._before_optimizer_step)
        self._steps.has_optimizers = bool(self._hooks)

    # -- opening and restoring ----------------------------------------------------------------------------------------

    def restore(
        self,
        *,
        step: int | None = None,
        before: int | None = None,
        only: str | set[str] | None = None,
        strict: bool = True,
        prefer: str | None = None,
    ) -> bool:
        """Bring the run back from the newest good checkpoint, the nearest copy of it first. False: nothing was there.

        step:    this one, instead of the newest; what came after it becomes an abandoned branch
        before:  the newest below this step
        only:    only these tracked objects; nothing else of the run is touched. Training then starts a new history
        strict:  False restores what fits and reports the rest as an event
        prefer:  exact, or newest, which may be lossy (`deltas=`); unless said: exact, if it is not much older

        Raises StateError (it does not fit the live objects) or RestoreError (there are checkpoints, and none is whole).
        """
        if self._reopened is not None:
            raise ConfigError("restore() comes once, before the first batch; make a new Checkpointer to go back again")
        if only is None:
            return self._reopen(step=step, before=before, strict=strict, prefer=prefer).restored is not None
        self._may_abandon = True
        which: dict[str, Any] = {"step": step, "before": before, "only": only, "strict": strict, "prefer": prefer}
        return load_only(self._paths, self._tracked, log=self._log, group=self._together.open(), **which)

    def _ensure_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this Checkpointer is closed; make a new one")
        if self._reopened is None:
            self._reopen(fresh=True, may_abandon=self._may_abandon)

    def _reopen(self, **wishes: Any) -> Reopened:
        wishes |= {"log": self._log, "client": self._client, "attach": self._attach, "check": self._own.check}
        wishes |= {"group": self._together.open(), "levels": self._levels, "deltas": self._deltas}
        with self._client.starting():
            reopened = reopen(self._paths, self._tracked, seed=self._seed, **wishes)
            self._open(reopened)
        return reopened

    def _attach(self, seed: int) -> None:
        self.data.begin(seed, self._together.owner)

    def _open(self, reopened: Reopened) -> None:
        """From here on the run is ours: agent, data, hooks, memory."""
        self._log.lineage = self._outcomes.lineage = reopened.lineage.number
        if reopened.own is not None:
            for problem in self._own.load(reopened.own, reopened.derived_seed):
                self._log.emit(events.Mismatch(problems=[problem]))
        self._snapshotter.open(reopened.lineage.number)
        self._client.start(reopened.hello(self._paths, self._keep, self._deltas))
        self._together.start()
        self._reopened = reopened
        self._saving.has_levels, self._saving.has_deltas = reopened.orders is not None, self._deltas is not None
        self._pace.open(is_restart=reopened.restored is not None)
        self._leave.listen()
        atexit.register(self._at_exit)
        self._progress.open(lineage=reopened.lineage.number, agent_pid=self._client.pid, step=self._steps.step)
        self._log.emit(reopened.start(step=self._steps.step, agent_pid=self._client.pid, data=self.data.exactness))
        self._prepare(reopened)

    def _prepare(self, reopened: Reopened) -> None:
        """Get memory ready early: after a restore at once, else after the first step (optimizers fill up there)."""
        if reopened.own is None:
            return
        self._outcomes.begin(self._steps.step, is_lossy=reopened.is_lossy)
        self._pace.restart(self._steps.step, durable=True)
        flat = self._capture.flatten(self._own.capture())
        self._pace.know(flat, self._steps.step)
        self._snapshotter.trust_frozen(flat, reopened.frozen)
        if self._together.is_alone:  # else after the first step: what differs between ranks shows then
            self._snapshotter.prepare(flat)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers that are left, the running one first. At the end commits the run, waits, and closes."""
        self._ensure_open()
        if self.data.at.epoch >= count:
            self._log.emit(events.Finished(step=self._steps.step, again=True))
            self.close()
            return
        self._own.is_finished = False
        for epoch in range(self.data.at.epoch, count):
            if epoch != self.data.at.epoch:
                self._own.go_to(epoch)
                self._pace.count_epoch()
            yield epoch
        self._count_step()
        self._own.go_to(count)
        self._own.is_finished = True
        self._saving.take_surely(self._close_seconds).wait(self._close_seconds)
        self._log.emit(events.Finished(step=self._steps.step, again=False))
        self.close()

    def _on_request(self) -> None:
        """The loop asks for a batch: everything of the iteration before it is over."""
        if not self._steps.is_explicit:
            if self._steps.is_ahead and not self._said_ahead:
                self._said_ahead = True
                self._log.emit(events.LookAhead(step=self._steps.step))
            self._end_iteration()
        self._own.settle_generators(again=True)

    def step(self, *, batches: int = 1) -> None:
        """End of the loop body, for loops that do not iterate `ckpt.data`, or read ahead: it used this many batches."""
        self._ensure_open()
        self._steps.on_call()
        self._own.tell(batches)
        self._own.settle_generators(again=False)
        self._end_iteration()

    def _end_iteration(self) -> None:
        """Count the step, if it was one, and ask the policies."""
        has_stepped, order = self._count_step(), self._leave.order
        if order is not None and (order.is_for_peer or (self._together.is_alone and self._steps.is_between)):
            self._go(order)
        if not has_stepped:
            return
        step, costs = self._steps.step, self._pace.end_iteration(self._steps.step)
        if costs is not None:
            self._together.tell_costs(costs)
        sure, wished = self._pace.wishes(step, is_epoch_end=self.data.is_at_end, again=self._outcomes.is_due_again)
        wished = (["look again"] if self._outcomes.has_drifted else []) + wished
        if order is not None:
            self._together.ask_to_leave()
            wished.append("leave")
        due = self._together.pass_step(step, wishes=wished, is_busy=self._outcomes.uploads.is_busy) | sure
        if "leave" in due:
            self._go(self._leave.take("another rank"))
        if "look again" in due:
            self._saving.look_again()
        if what := next((what for what in ("save", "memory") if what in due), None):
            self._saving.take(block=False, durable=what == "save", is_planned=what not in sure)
        elif "look again" in due or self._snapshotter.is_unprepared:
            self._saving.prepare()
        self._together.tell_ready(self._snapshotter.pool.is_ready)

    def _count_step(self) -> bool:
        self._log.flush(until=self._steps.step)  # a step late: a tensor of this one would make the host wait
        if not self._steps.end_iteration():
            return False
        self._own.note_step()
        self._progress.update(self._steps.step)
        return True

    def _before_optimizer_step(self, *_: Any) -> None:
        """The gate: runs before every step of a tracked optimizer."""
        if not self._steps.has_stepped:
            with contextlib.suppress(StateError):  # said again, with its path, by the first save
                self._snapshotter.observe(self._capture.flatten())
        self._pace.waited(self._snapshotter.gate())
        self._steps.on_optimizer_step()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Guard a change of tensors that no optimizer hook sees: a custom step, a CUDA graph. Counts as a step."""
        self._ensure_open()
        self._before_optimizer_step()
        yield

    def log(self, **values: Any) -> None:
        """Note values of the running step in the event log. Tensors are read one step later, so nothing waits."""
        self._ensure_open()
        self._log.keep(self._steps.step + 1, values)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, *, name: str | None = None, files: options.Files | None = None) -> SaveHandle:
        """Save now. Waits for memory, a free slot and the copy of what is on the CPU, not for the disk: see the handle.

        After this iteration's optimizer step it counts as the end of the iteration: call it last in the loop body.

        name:   keep this checkpoint for ever under this name
        files:  also store these files of yours; leave them unchanged until `upload_completion`
        """
        self._ensure_open()
        self._own.tell_early()
        self._count_step()  # or a resume would apply this batch twice
        self._own.is_after_epoch = self._own.is_past_epoch  # or it would run the code after the loop twice
        try:
            handle = self._saving.take(block=True, name=name, files=options.check_files(files))
            self._snapshotter.copy_now()  # asked for: on return a kill of this process loses nothing that is on the CPU
        finally:
            self._own.is_after_epoch = False
        assert handle is not None
        return handle

    def wait(self, timeout: float | None = None) -> None:
        """Block until every snapshot taken so far is committed. Raises PersistError for one that was given up."""
        self._snapshotter.drain()
        self._outcomes.uploads.wait(timeout)

    def status(self) -> Status:
        """Where the run stands."""
        here = {"step": self._steps.step, "epoch": self.data.at.epoch, "lineage": self._log.lineage}
        return self._outcomes.status(agent_pid=self._client.pid, policy=self._pace.explain(), **here)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _go(self, order: Order) -> None:
        """Told to leave, and an iteration is over: one more checkpoint, as far as the time allows. Raises to leave."""
        self._leave.finish(order, self._saving.take_last, self.wait)
        self._close_seconds = min(self._close_seconds, order.seconds_for_disk)
        self._is_failing = order.is_for_peer and not self._together.is_alone
        self._pace.close(TOLD)
        with contextlib.suppress(PersistError):
            self.close(save=False)
        self._leave.exit()

    def close(self, *, save: bool = True) -> None:
        """Save the last step if it is not saved, wait until everything is durable, end the agent."""
        if self._is_closed or os.getpid() != self._pid:
            self._is_closed = True
            return
        try:
            if save and self._reopened is not None and not self._outcomes.is_lost and not self._together.is_broken:
                self._count_step()
                self._saving.take_last(self._close_seconds)
        finally:
            self._is_closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        atexit.unregister(self._at_exit)
        self._leave.stop()
        for handle in self._hooks:
            handle.remove()
        self._log.flush()
        self._snapshotter.stop()
        pending = self._outcomes.uploads.pending()
        if self._is_failing or self._together.is_broken:
            pending = []  # what is complete is written; the agent keeps its memory for the next start of all ranks
        else:
            self._client.close(seconds=self._close_seconds if pending or self._saving.has_levels else 10.0)
        self._snapshotter.close()
        self._together.close()
        self._pace.close(CLOSED)
        self._log.close()
        self._pace.release()
        self._progress.close()
        if left := sum(not future.done() for future in pending):
            raise PersistError(f"{left} snapshots did not become durable; `events.jsonl` tells why")

    def _at_exit(self) -> None:
        """The interpreter ends without close(): finish complete snapshots, leave no process. Nothing new is saved."""
        self._fail_with(getattr(sys, "last_type", None))
        with contextlib.suppress(PersistError):
            self.close(save=False)

    def _fail_with(self, kind: type[BaseException] | None) -> None:
        """The process ends with this exception, if any. Of many ranks another one may have died: all begin again."""
        self._pace.close_after(kind)
        self._is_failing = kind is not None and not self._together.is_alone

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # After an exception the state may be half changed: what is on disk is better than what is in memory.
        self._fail_with(kind)
        self.close(save=kind is None)
