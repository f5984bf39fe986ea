"""The public class: the stages of a checkpoint, and the loop around them. Only this module wires the stages.

    save:     state -> snapshot -> arena -> agent -> store          (`training/loop/save`)
    restore:  inventory -> plan -> verified read -> load into state (`restore/open_run`)
    policy:   decides after every step whether to save; all ranks agree (`training/loop/iteration`, `ranks/member`)

Holds:   a save is triggered when the iteration is over (at the next batch request, or in `step()`). The gate before
         every optimizer step is the only wait in the training thread. A failed checkpoint never stops training.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepwell.errors import ConfigError
from stepwell.events import journal, run_events
from stepwell.handover.client import AgentClient
from stepwell.levels.level_spec import Node, Shared, read_levels
from stepwell.ranks.member import Together
from stepwell.restore.open_request import LoadRequest, OpenRequest, Wish
from stepwell.restore.open_run import Reopened, load_only, reopen
from stepwell.storage.codecs.codec_spec import Spec
from stepwell.storage.store.learned import TOLD
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import ProgressFile
from stepwell.training.data.batches import Batches
from stepwell.training.data.steps import StepCounter
from stepwell.training.loop import options
from stepwell.training.loop.ending import Ending
from stepwell.training.loop.forked_child import Home
from stepwell.training.loop.iteration import Iteration
from stepwell.training.loop.outcomes import Outcomes
from stepwell.training.loop.preemption import Leave
from stepwell.training.loop.reactions import AgentReactions, RankReactions
from stepwell.training.loop.run_state import OwnState
from stepwell.training.loop.save import Saving
from stepwell.training.loop.save_handle import SaveHandle
from stepwell.training.loop.schedule import Schedule
from stepwell.training.policy.every import Every, Policy
from stepwell.training.snapshot.snapshot_options import SnapshotOptions
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.training.state.capture import Capture
from stepwell.training.state.gradients import Gradients
from stepwell.training.state.settings import settings
from stepwell.training.state.tracked import hook
from stepwell.training.state.tracked import track as track_objects
from stepwell.training.state.untracked import Untracked
from stepwell.types import Keep, Status

if TYPE_CHECKING:
    from stepwell.storage.codecs.assignment import Deltas


_open_runs: weakref.WeakValueDictionary[tuple[str, int], Ending] = weakref.WeakValueDictionary()
"""The open runs of this process, by run and rank. A new Checkpointer of the same run closes the old one."""


class Checkpointer:
    """Saves a run so that a failure costs only seconds of work. The constructor does no I/O; `restore()` does."""

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
        """Only the directory (or `s3://...`) and the objects (`**tracked`, or `track={}`) are required.

        overhead:      share of the time that saving may cost (0.035); short for policy=Auto(overhead=)
        policy, keep:  when to save a checkpoint, and how many to keep
        memory:        how often to keep an in-memory copy between disk checkpoints: `Every(steps=1)` is cheap on a GPU.
                       If this process crashes, stepwell writes the newest copy to disk and restores it
        deltas:        LC(bits=3), or Deltas(...): write lossy changes to disk after every step between checkpoints
        levels:        [Node("/local/cache"), Shared(every=10)]: save on each node's disk, copy every tenth from there
        data, seed:    the loader behind `ckpt.data`, and the seed of its order; on_unseekable="replay" reads again
        grace:         seconds to save and exit after SIGTERM, SIGINT, SIGUSR1 or a notice; None: ignore signals
        notice:        a path that appears, or a function that returns True, before the machine goes away
        host_memory:   bytes for copies in memory; saves block training if one copy does not fit
        snapshot:      auto, device, overlap or blocking; verify_snapshots hashes every leaf before and after the copy
        """
        given = {"keep": keep, "data": data, "seed": seed, "host_memory": host_memory, "snapshot": snapshot}
        given |= {"grace": grace, "notice": notice, "on_unseekable": on_unseekable, "policy": policy}
        options.check_options(memory=memory, track=track, **given)
        self._together = Together()
        place, owner = options.run_place(where), self._together.owner
        self._deltas = options.read_deltas(deltas, place=place, memory=memory, levels=levels, ranks=owner.world_size)
        memory, levels = (memory, levels) if self._deltas is None else (Every(steps=self._deltas.every), [])
        self._home = Home(place)
        self._remarks = options.remarks(where, place)
        self._paths = RunPaths.at(place, owner.rank)
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._seed, self._levels = seed, read_levels(levels)
        self._tracked = track_objects(options.named_objects(track, tracked))
        self._capture = Capture(self._tracked)
        self._log = journal.EventLog(self._paths.events, who="trainer", rank=self._paths.rank, background=True)
        self._progress = ProgressFile(self._paths.progress, self._log.later)
        has_optimizers = any(item.optimizer is not None for item in self._tracked)
        self._steps = steps = StepCounter(has_optimizers=has_optimizers, has_data=data is not None)
        self._pace = pace = Schedule(self._paths, owner, options.choose_policy(policy, overhead), memory, self._log)
        self._client = AgentClient(self._log)
        verify = options.is_set("STEPWELL_VERIFY") or verify_snapshots
        slots = 2 if memory is None else 3 if self._deltas is None else 4
        self._snapshotter = Snapshotter(
            self._tracked,
            SnapshotOptions(snapshot, verify, host_memory, slots, self._deltas),
            log=self._log,
            client=self._client,
        )
        self._outcomes = Outcomes(pace, self._snapshotter, self._log)
        self._leave = Leave(self._log, lambda: steps.step, lambda: pace.close(TOLD), grace, notice)
        self.data = Batches(data, on_unseekable, self._log.emit)
        self._gradients = Gradients(self._tracked)
        self._own = OwnState(steps, self.data, self._gradients)
        self._reopened: Reopened | None = None
        self._may_abandon = False
        stages = self._snapshotter, self._outcomes, self._together, self._client, self._log
        self._saving = Saving(self._capture, self._own, steps, pace, *stages)
        loop = steps, self.data, self._own, self._gradients, self._capture, pace, self._leave
        self._iteration = Iteration(
            *loop,
            *stages[:3],
            self._saving,
            self._log,
            self._home,
            Untracked(self._tracked, self._log.emit),
            wants_epochs=options.wants_epochs(policy, memory, self._keep),
            ensure_open=self._ensure_open,
            on_step=self._progress.update,
        )
        self.data.report_to(self._iteration)
        hooks = hook(self._tracked, self._iteration.before_optimizer_step, self._iteration.after_optimizer_step)
        parts = self._saving, self._iteration, self._leave, pace, self._progress
        seconds = options.seconds_from("STEPWELL_CLOSE_SECONDS", 120)
        self._ending = Ending(*stages, *parts, self._home, seconds, hooks)

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
        """Restore the newest good checkpoint from its nearest copy. Returns False if there is none.

        step:    restore this step instead of the newest; later checkpoints become an abandoned branch
        before:  restore the newest checkpoint before this step
        only:    restore only these tracked objects; training then starts a new history
        strict:  False restores what fits and reports the rest as an event
        prefer:  exact, or newest, which may be lossy (`deltas=`); by default exact, unless it is much older

        Raises StateError (it does not fit the live objects) or RestoreError (there are checkpoints and none is whole,
        or none at `step`, or below `before`).
        """
        self._home.check()
        options.check_wishes(step, before, only, [item.name for item in self._tracked])
        if self._reopened is not None:
            raise ConfigError("call restore() once, before the first batch; create a new Checkpointer to go back")
        wish = Wish(step, before, prefer)
        if only is None:
            restored = self._reopen(wish=wish, strict=strict).restored
            self._own.is_stopped &= step is None and before is None  # who names a checkpoint wants to train on
            return restored is not None
        self._may_abandon = True
        request = LoadRequest.of(only, wish, strict=strict)
        return load_only(self._paths, self._tracked, request, log=self._log, group=self._together.open())

    def _ensure_open(self) -> None:
        self._home.check()
        if self._ending.is_closed:
            raise self._ending.refusal(is_over=self._own.is_finished, by_finish=self._own.is_stopped)
        if self._reopened is None:
            self._reopen(fresh=True, may_abandon=self._may_abandon)

    def _reopen(self, **wanted: Any) -> Reopened:
        group = self._together.open()
        self._own.given = settings(self._tracked)
        self._take_over()
        request = OpenRequest(
            attach=lambda seed: self.data.begin(seed, self._together.owner), check=self._own.check,
            seed=self.data.seed if self._seed is None else self._seed,
            levels=self._levels, deltas=self._deltas, keep=self._keep, **wanted,
        )  # fmt: skip
        try:
            with self._client.starting():
                reopened = reopen(self._paths, self._tracked, request, log=self._log, client=self._client, group=group)
                self._open(reopened)
        except BaseException:
            if self._client.is_started:
                self.close(save=False)
            self._log.close()  # nothing stays behind; restore() may be called again, otherwise
            raise
        return reopened

    def _take_over(self) -> None:
        """Close an older Checkpointer of this run in this process first, so that its state is written and restored."""
        with contextlib.suppress(OSError):  # there is no such run yet
            before = _open_runs.get((self._paths.identity, self._paths.rank))
            if before is not None and before is not self._ending:
                before.give_way()

    def _open(self, reopened: Reopened) -> None:
        """Take over the run: agent, data, hooks, memory."""
        number = self._log.lineage = reopened.lineage.number
        self._outcomes.open(number, AgentReactions(self._together, self._saving, self._progress))
        self._gradients.begin()
        if reopened.own is not None:
            for problem in self._own.load(reopened.own, reopened.derived_seed):
                self._log.emit(run_events.Mismatch(problems=[problem]))
            for event in self._own.remarks(reopened.own, settings(self._tracked)):
                self._log.emit(event)
        self._iteration.begin(self._ending.go)
        self._snapshotter.open(number, self._outcomes)
        self._client.start(reopened.hello(self._paths, self._keep, self._deltas), self._outcomes.on_agent)
        stages = self._capture, self._pace, self._leave, self._outcomes, self._saving, self._iteration
        self._together.start(reopened.key, RankReactions(*stages), self._log)
        self._reopened = reopened
        _open_runs[self._paths.identity, self._paths.rank] = self._ending
        self._ending.name_those_beside(list(_open_runs.values()))
        for remark in self._remarks:
            self._log.emit(remark)
        self._saving.open(has_levels=reopened.orders is not None, has_deltas=self._deltas is not None)
        self._pace.open(is_restart=reopened.restored is not None)
        self._ending.listen()
        self._progress.open(lineage=number, agent_pid=self._client.pid, step=self._steps.step)
        self._log.emit(reopened.start(step=self._steps.step, agent_pid=self._client.pid, data=self.data.exactness))
        self._prepare(reopened)

    def _prepare(self, reopened: Reopened) -> None:
        """Allocate memory early: at once after a restore, else after the first step (which creates optimizer state)."""
        if reopened.own is None:
            return
        self._outcomes.begin(self._steps.step, is_lossy=reopened.is_lossy)
        self._pace.restart(self._steps.step, durable=True, is_epoch_end=self._own.is_epoch_end)
        flat = self._capture.flatten(self._own.capture())
        self._pace.know(flat, self._steps.step)
        self._snapshotter.trust_frozen(flat, reopened.frozen)
        if self._together.is_alone:  # else after the first step: what differs between ranks shows then
            self._snapshotter.prepare(flat)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate the epoch numbers that are left, the current one first. At the end: save, wait for disk, close."""
        self._ensure_open()
        options.check_count(count)
        if self.data.at.epoch >= count or self._own.is_stopped:
            self._log.emit(run_events.Finished(step=self._steps.step, again=True, early=self._own.is_stopped))
            self.close()
            return
        self._own.is_finished = False
        self._iteration.epochs = count
        for epoch in range(self.data.at.epoch, count):
            if epoch != self.data.at.epoch:
                self._iteration.end_epoch()
                self._own.go_to(epoch)
            self._own.begin_epoch()
            yield epoch
            self._home.check()
            if self._ending.is_closed:
                return
        self._iteration.count_step()
        self._own.go_to(count)
        self._finish(is_stopped=False)

    def finish(self) -> None:
        """End training before its last epoch (early stopping): save, wait, close. A restart trains no further.

        The loop over `ckpt.data` ends after the current body, and then `epochs()`.
        """
        if self._ending.is_closed and self._own.is_stopped:
            return
        self._ensure_open()
        self._finish(is_stopped=True)

    def _finish(self, *, is_stopped: bool) -> None:
        self._own.is_finished, self._own.is_stopped = True, is_stopped
        self._iteration.finish(self._ending.seconds)
        self._log.emit(run_events.Finished(step=self._steps.step, again=False, early=is_stopped))
        self.close()

    def step(self, *, batches: int | None = None) -> None:
        """Mark the end of the loop body, in loops that do not iterate `ckpt.data`, prefetch, or skip batches.

        batches:  number of batches of `ckpt.data` that this body used (default: all it took); needed with prefetching
        """
        self._ensure_open()
        self._iteration.step(batches)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Guard a change of tensors that no optimizer hook sees (a custom step, a CUDA graph). Counts as a step."""
        self._ensure_open()
        self._iteration.before_optimizer_step()
        yield

    def log(self, **values: Any) -> None:
        """Log values of the current step in the event log. Tensors are read one step later, so nothing waits.

        Also works after the end of `epochs()` or `finish()`; values are then written at once.
        """
        is_over = self._ending.is_closed and self._own.is_finished
        if not is_over:
            self._ensure_open()
        self._home.check()
        self._log.keep(self._steps.step + 1, values)
        if is_over:
            self._ending.log_more()

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, *, name: str | None = None, files: options.Files | None = None) -> SaveHandle:
        """Save now. Waits for memory, a free slot and the copy of CPU tensors, but not for the disk: see the handle.

        Call it last in the loop body: after the optimizer step it ends the iteration. In the middle of a step,
        stepwell saves at the end of that step, and you cannot wait for it before.

        name:   keep this checkpoint forever under this name
        files:  also store these files; leave them unchanged until `upload_completion`
        """
        self._ensure_open()
        return self._iteration.save(name, options.check_files(files))

    def wait(self, timeout: float | None = None) -> None:
        """Block until every snapshot so far is committed. Raises PersistError if one was given up."""
        self._home.check()
        self._ending.wait(timeout)

    def status(self) -> Status:
        """Return the current state of the run."""
        self._home.check()
        here = {"step": self._steps.step, "epoch": self.data.at.epoch, "lineage": self._log.lineage}
        here["is_finished"] = self._own.is_finished
        return self._outcomes.status(agent_pid=self._client.pid, policy=self._pace.explain(), **here)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, save: bool = True) -> None:
        """Save the last step if needed, wait until everything is durable, end the agent."""
        self._ending.close(save=save)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._ending.leave_block(kind)
