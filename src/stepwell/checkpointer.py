"""The life of a checkpoint, stage by stage, and the loop around it. The only place that wires the stages together.

    save:     state -> snapshot -> arena -> agent -> store          (`_save`)
    restore:  inventory -> plan -> verified read -> load into state (`restore`, in `reopen`)
    beside:   policy answers "now?" after every step                (`_end_iteration`)

Holds:   the trigger sits where everything of an iteration is over (the next batch request, or `step()`); the gate
         before every optimizer step is the only wait in the training thread; a failed checkpoint never stops training.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from stepwell import events, journal
from stepwell.agent.client import AgentClient
from stepwell.arena.channel import Message
from stepwell.data.batches import Batches
from stepwell.data.steps import StepCounter
from stepwell.errors import AgentError, ConfigError, PersistError, StateError
from stepwell.options import Files, check_files, check_options, named_objects, run_directory, seconds_from
from stepwell.own import OwnState
from stepwell.policy.every import Cadences, Every, Never, Policy
from stepwell.reopen import Reopened, load_only, reopen
from stepwell.snapshot.inflight import Inflight
from stepwell.snapshot.snapshotter import Snapshotter
from stepwell.snapshot.uploads import SaveHandle, Uploads
from stepwell.state.capture import Capture
from stepwell.state.tracked import track as track_objects
from stepwell.store.paths import RunPaths
from stepwell.store.progress import ProgressFile
from stepwell.types import Keep, Status


class Checkpointer:
    """Keeps a training run from losing more than a few seconds of work. Constructing only assigns."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        memory: Policy | None = None,
        keep: int | Keep = 2,
        data: Any = None,
        seed: int | None = None,
        on_unseekable: str = "error",
        host_memory: int | None = None,
        snapshot: str = "auto",
        verify_snapshots: bool = False,
        track: dict[str, Any] | None = None,
        **tracked: Any,
    ) -> None:
        """Only the directory and the objects (`**tracked`, or `track={}`) have no default.

        policy, keep:  when to write a checkpoint (every 60 s), and how many stay
        memory:        when to copy the state into memory only, in between: `Every(steps=1)` is cheap on a GPU. If this
                       process crashes, the newest copy is restored from there, and written to disk
        data, seed:    the loader behind `ckpt.data`, and the seed of its order; on_unseekable="replay" reads again
        host_memory:   bytes for copies in memory; too few for one of them means blocking saves
        snapshot:      auto, device, overlap or blocking; verify_snapshots hashes every leaf before and after
        """
        options = {"keep": keep, "data": data, "seed": seed, "host_memory": host_memory, "snapshot": snapshot}
        check_options(policy=policy, memory=memory, track=track, on_unseekable=on_unseekable, **options)
        self._paths = RunPaths(run_directory(where))
        self._due = Cadences(policy or Every(seconds=60), memory or Never())
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._seed = seed
        self._tracked = track_objects(named_objects(track, tracked))
        self._capture = Capture(self._tracked)
        self._log = journal.EventLog(self._paths.events, who="trainer", background=True)
        self._client = AgentClient(self._log, self._on_agent)
        self._snapshotter = Snapshotter(
            self._tracked,
            strategy=snapshot,
            verify=verify_snapshots or os.environ.get("STEPWELL_VERIFY") == "1",
            host_memory=host_memory,
            slots=2 if memory is None else 3,
            log=self._log,
            client=self._client,
            on_settled=self._on_settled,
        )
        self._progress = ProgressFile(self._paths.progress, self._log.later)
        self._steps, self._uploads = StepCounter(), Uploads()
        self._close_seconds = seconds_from("STEPWELL_CLOSE_SECONDS", 120)
        loop = self._ensure_open, self._on_request, self._steps.on_delivered
        self.data = Batches(data, *loop, on_unseekable, self._log.emit)
        self._own = OwnState(self._steps, self.data)
        self._pid = os.getpid()
        self._reopened: Reopened | None = None
        self._is_closed = self._is_fenced = self._is_lost = False
        self._may_abandon = self._said_ahead = self._is_due_again = False
        self._repeats: dict[int, int] = {}
        self._committed_step: int | None = None
        self._memory_step: int | None = None
        self._hooks = [
            item.optimizer.register_step_pre_hook(self._before_optimizer_step)
            for item in self._tracked
            if item.optimizer is not None
        ]
        self._steps.has_optimizers = bool(self._hooks)

    # -- opening and restoring ----------------------------------------------------------------------------------------

    def restore(
        self,
        *,
        step: int | None = None,
        before: int | None = None,
        only: str | set[str] | None = None,
        strict: bool = True,
    ) -> bool:
        """Bring the run back from the newest good checkpoint, the nearest copy of it first. False: nothing was there.

        step:    this one, instead of the newest; what came after it becomes an abandoned branch
        before:  the newest below this step
        only:    only these tracked objects; nothing else of the run is touched. Training then starts a new history
        strict:  False restores what fits and reports the rest as an event

        Raises StateError (it does not fit the live objects) or RestoreError (there are checkpoints, and none is whole).
        """
        if self._reopened is not None:
            raise ConfigError("restore() comes once, before the first batch; make a new Checkpointer to go back again")
        if only is None:
            return self._reopen(step=step, before=before, strict=strict).restored is not None
        self._may_abandon = True
        only = {only} if isinstance(only, str) else only
        return load_only(self._paths, self._tracked, log=self._log, step=step, before=before, only=only, strict=strict)

    def _ensure_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this Checkpointer is closed; make a new one")
        if self._reopened is None:
            self._reopen(fresh=True, may_abandon=self._may_abandon)

    def _reopen(self, **wishes: Any) -> Reopened:
        wishes |= {"log": self._log, "client": self._client, "attach": self.data.begin, "check": self._own.check}
        with self._client.starting():
            reopened = reopen(self._paths, self._tracked, seed=self._seed, **wishes)
            self._open(reopened)
        return reopened

    def _open(self, reopened: Reopened) -> None:
        """From here on the run is ours: agent, data, hooks, memory."""
        self._log.lineage = reopened.lineage.number
        if reopened.own is not None:
            for problem in self._own.load(reopened.own):
                self._log.emit(events.Mismatch(problems=[problem]))
        self._snapshotter.open(reopened.lineage.number)
        self._client.start(reopened.hello(self._paths, self._keep))
        self._reopened = reopened
        atexit.register(self._at_exit)
        with contextlib.suppress(OSError):  # reports are poorer without it, nothing else
            self._progress.open(lineage=reopened.lineage.number, agent_pid=self._client.pid)
        self._progress.update(self._steps.step)
        self._log.emit(reopened.start(step=self._steps.step, agent_pid=self._client.pid, data=self.data.exactness))
        self._prepare(reopened)

    def _prepare(self, reopened: Reopened) -> None:
        """Get memory ready early: after a restore at once, else after the first step (optimizers fill up there)."""
        if reopened.own is None:
            return
        self._committed_step = self._steps.step
        self._due.restart(self._steps.step, durable=True)
        self._snapshotter.prepare(self._capture.flatten(self._own.capture()), frozen=reopened.frozen)

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
                self._due.count_epoch()
            yield epoch
        self._count_step()
        self._own.go_to(count)
        self._own.is_finished = True
        self._save_surely().wait(self._close_seconds)
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
        if not self._count_step():
            return
        step, is_end = self._steps.step, self.data.is_at_end
        if self._is_due_again or self._due.disk.is_due(step, is_epoch_end=is_end):
            self._save(block=False)
        elif self._due.memory.is_due(step, is_epoch_end=is_end):
            self._save(block=False, durable=False)
        elif self._snapshotter.is_unprepared:
            self._snapshotter.prepare(self._capture.flatten(self._own.capture(is_draft=True)))

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
        self._snapshotter.gate()
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

    def save(self, *, name: str | None = None, files: Files | None = None) -> SaveHandle:
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
            handle = self._save(block=True, name=name, files=check_files(files))
            self._snapshotter.copy_now()  # asked for: on return a kill of this process loses nothing that is on the CPU
        finally:
            self._own.is_after_epoch = False
        assert handle is not None
        return handle

    def _save_surely(self) -> SaveHandle:
        """The last save of a run: one that turns out void is taken again, blocking."""
        handle = self._save(block=True)
        if handle is None or handle.staging_completion.exception() is not None:
            handle = self._save(block=True)
        assert handle is not None
        return handle

    def _save(
        self, *, block: bool, durable: bool = True, name: str | None = None, files: dict[str, str] | None = None
    ) -> SaveHandle | None:
        """state -> snapshot -> arena -> agent. None: put off (an event says why); asked again after the next step."""
        step, repeat = self._steps.step, self._repeats.get(self._steps.step, -1) + 1
        if self._is_lost:
            if block:
                raise AgentError("the agent died again and again; see the log above for its error")
            return None
        try:
            flat = self._capture.flatten(self._own.capture())
            meta = {"step": step, "repeat": repeat, "durable": durable, "created": time.time(), "tree": flat.tree}
            is_end = self.data.is_at_end or self._own.is_finished
            meta |= {"epoch_end": is_end, "finished": self._own.is_finished, "name": name, "files": files or {}}
            taken = self._snapshotter.take(flat, meta, block=block)
        except Exception as error:
            if block:
                raise
            taken = f"{type(error).__name__}: {error}"  # a failed checkpoint never stops training
            self._due.restart(step, durable=durable)  # and the same at every step helps nobody
        if isinstance(taken, str):
            self._log.emit(events.SnapshotSkipped(step=step, reason=taken))
            return None
        self._due.restart(step, durable=durable)
        if not durable:
            return None
        self._is_due_again, self._repeats = False, {step: repeat}
        return SaveHandle(step, taken.staged, self._uploads.open(taken.sequence))

    def _on_settled(self, inflight: Inflight) -> None:
        """Copier thread: a snapshot is complete, or void."""
        if inflight.void is None:
            self._memory_step = inflight.step
        elif inflight.is_durable:
            reason = f"snapshot of step {inflight.step} is void: {inflight.void.leaf} ({inflight.void.seen_by})"
            self._uploads.fail(inflight.sequence, PersistError(reason, step=inflight.step))
            self._is_due_again = True  # at the next step, blocking

    def _on_agent(self, message: Message) -> None:
        """Listening thread: the agent tells what became of a snapshot."""
        kind, sequence = message["type"], message.get("sequence", 0)
        if kind == "durable":
            self._committed_step = message["step"]
            self._uploads.succeed(sequence, message["directory"])
        elif kind == "released":
            self._snapshotter.pool.release(sequence)
            self._uploads.forget(sequence)
        elif kind == "failed":
            self._is_fenced = self._is_fenced or (message["fenced"] and message["lineage"] == self._log.lineage)
            if message["final"]:
                self._uploads.fail(sequence, PersistError(message["error"], step=message["step"]))
        elif kind == "replaced":
            self._progress.update(self._steps.step, agent_pid=message["pid"])
        elif kind == "lost":
            self._is_lost = True
            self._snapshotter.pool.release_all()
            self._uploads.fail_all(PersistError("the agent died again and again; see the log"))
        if self._snapshotter.pool.is_streaming:
            self._snapshotter.answers.put(message)  # the training thread waits for it

    def wait(self, timeout: float | None = None) -> None:
        """Block until every snapshot taken so far is committed. Raises PersistError for one that was given up."""
        self._snapshotter.drain()
        self._uploads.wait(timeout)

    def status(self) -> Status:
        """Where the run stands."""
        return Status(
            step=self._steps.step,
            epoch=self.data.at.epoch,
            committed_step=self._committed_step,
            memory_step=self._memory_step,
            pending=len(self._uploads.pending()),
            agent_pid=self._client.pid,
            lineage=self._log.lineage,
            is_fenced=self._is_fenced,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, save: bool = True) -> None:
        """Save the last step if it is not saved, wait until everything is durable, end the agent."""
        if self._reopened is None or self._is_closed or os.getpid() != self._pid:
            self._is_closed = True
            return
        try:
            if save and not self._is_lost:
                self._count_step()
                if self._due.disk.step != self._steps.step or self._is_due_again:
                    self._save_surely()
        finally:
            self._is_closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()
        self._log.flush()
        self._snapshotter.stop()
        pending = self._uploads.pending()
        self._client.close(seconds=self._close_seconds if pending else 10.0)
        self._snapshotter.close()
        self._log.close()
        self._progress.close()
        left = sum(not future.done() for future in pending)
        if left:
            raise PersistError(f"{left} snapshots did not become durable; `events.jsonl` tells why")

    def _at_exit(self) -> None:
        """The interpreter ends without close(): finish complete snapshots, leave no process. Nothing new is saved."""
        with contextlib.suppress(PersistError):
            self.close(save=False)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # After an exception the state may be half changed: what is on disk is better than what is in memory.
        self.close(save=kind is None)
