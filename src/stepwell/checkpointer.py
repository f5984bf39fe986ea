"""The life of a checkpoint, stage by stage, and the loop around it. The only place that wires the stages together.

    save:     state -> snapshot -> arena -> agent -> store          (`_save`)
    restore:  inventory -> plan -> verified read -> load into state (`restore`)
    beside:   policy answers "now?" after every step                (`_after_step`)

Holds:   a step is a loop iteration in which a tracked optimizer stepped; the trigger sits where everything of the
         iteration is over (the next batch request, or `step()`); a failed checkpoint never stops training.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stepwell import events
from stepwell.agent.client import AgentClient
from stepwell.arena.channel import Message
from stepwell.data.loader import Batches, make_source
from stepwell.errors import ConfigError, PersistError, StateError
from stepwell.policy.every import Every, Moment, Policy
from stepwell.reopen import Reopened, reopen
from stepwell.snapshot.inflight import Inflight
from stepwell.snapshot.snapshotter import Snapshotter
from stepwell.state import rng
from stepwell.state.flatten import Flat, flatten
from stepwell.state.tracked import Tracked, track
from stepwell.store.paths import RunPaths
from stepwell.store.progress import ProgressFile
from stepwell.types import Keep

_STEPS_WITHOUT_TRIGGER = 20
_CLOSE_SECONDS = 120.0
_STRATEGIES = ("auto", "device", "overlap", "blocking")


@dataclass(frozen=True)
class SaveHandle:
    """One save. `staging_completion`: the state may be changed; `upload_completion`: the checkpoint is committed."""

    step: int
    staging_completion: Future[None]
    upload_completion: Future[str]

    def wait(self, timeout: float | None = None) -> str:
        """Block until it is committed; returns the checkpoint's directory. Raises what went wrong."""
        return self.upload_completion.result(timeout)


@dataclass(frozen=True)
class Status:
    """Where the run stands."""

    step: int
    epoch: int
    committed_step: int | None
    pending: int
    agent_pid: int
    lineage: int
    is_fenced: bool


class Checkpointer:
    """Keeps a training run from losing more than a few seconds of work. Constructing only assigns."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        keep: int | Keep = 2,
        data: Any = None,
        seed: int | None = None,
        host_memory: int | None = None,
        snapshot: str = "auto",
        verify_snapshots: bool = False,
        track: dict[str, Any] | None = None,
        **tracked: Any,
    ) -> None:
        self._paths = RunPaths(_directory(where))
        self._policy: Policy = Every(seconds=60) if policy is None else policy
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._seed = seed
        self._data = data
        self._tracked = _track(track or {}, tracked, self._policy, snapshot)
        self._log = events.EventLog(self._paths.events, who="trainer")
        self._client = AgentClient(self._log, self._on_agent)
        self._snapshotter = Snapshotter(
            self._tracked,
            strategy=snapshot,
            verify=verify_snapshots or os.environ.get("STEPWELL_VERIFY") == "1",
            host_memory=host_memory,
            log=self._log,
            client=self._client,
        )
        self._snapshotter.on_settled = self._on_settled
        self._progress = ProgressFile(self._paths.progress)
        self.data = Batches(self._on_request, self._on_delivered)
        self._is_open = self._is_closed = False
        self._pid = os.getpid()
        self._lineage = 0
        self._step = 0
        self._consumed_at_step = 0
        self._is_finished = False
        self._rng_to_set: dict[str, Any] | None = None
        self._stepped = False
        self._explicit = False
        self._delivered_since_step = 0
        self._hook_calls = 0
        self._said_look_ahead = self._warned_no_trigger = False
        self._saved_step = -1
        self._repeats: dict[int, int] = {}
        self._last_save_at = time.monotonic()
        self._epochs_since = 0
        self._committed_step: int | None = None
        self._is_fenced = False
        self._uploads: dict[int, Future[str]] = {}
        self._logged: list[tuple[int, dict[str, Any]]] = []
        self._hooks: list[Any] = []

    # -- opening and restoring ------------------------------------------------------------------------------------------

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
        only:    only these tracked objects; counters, generators and data start anew
        strict:  False restores what fits and reports the rest as an event

        Raises StateError if a checkpoint does not fit the live objects, RestoreError if there are checkpoints and none
        can be restored.
        """
        if self._is_open:
            raise ConfigError(
                "restore() comes before the first batch, and once; make a new Checkpointer to go back again"
            )
        wanted = {only} if isinstance(only, str) else only
        self._open(reopen(self._paths, self._tracked, seed=self._seed, log=self._log, client=self._client,
                          step=step, before=before, only=wanted, strict=strict))  # fmt: skip
        return self._reopened.restored is not None

    def _open(self, reopened: Reopened) -> None:
        """From here on the run is ours: lineage, agent, data, hooks."""
        self._reopened = reopened
        self._lineage = self._log.lineage = reopened.lineage.number
        self._snapshotter.open(self._lineage)
        keep = asdict(self._keep)
        linger = float(os.environ.get("STEPWELL_LINGER", 60))
        self._client.start(
            {"type": "hello", "pid": os.getpid(), "run": reopened.run.id, "root": str(self._paths.root), "keep": keep,
             "lineage": self._lineage, "rank": 0, "world_size": 1, "linger": linger}
        )  # fmt: skip
        if self._data is not None:
            self.data.attach(make_source(self._data, reopened.run.seed))
        if reopened.own is not None:
            self._set_own(reopened.own)
        for item in self._tracked:
            if item.optimizer is not None:
                self._hooks.append(item.optimizer.register_step_pre_hook(self._on_optimizer_step))
        atexit.register(self._at_exit)
        self._is_open = True
        with contextlib.suppress(OSError):
            self._progress.open(lineage=self._lineage, agent_pid=self._client.pid)
        self._progress.update(self._step)
        self._log.emit(
            events.Start(run=reopened.run.id, step=self._step, pid=os.getpid(), agent_pid=self._client.pid,
                         host=os.uname().nodename)
        )  # fmt: skip
        if reopened.restored is not None:
            self._committed_step = self._saved_step = self._step
            self._repeats[self._step] = -1
            if reopened.own is not None:
                flat = flatten(self._state())
                self._snapshotter.trust_frozen(flat, reopened.frozen)
                self._snapshotter.prepare(flat)  # the first save is no slower than the others
        else:
            self._snapshotter.observe(flatten({item.name: item.state() for item in self._tracked}))

    def _ensure_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this Checkpointer is closed; make a new one")
        if not self._is_open:
            self._open(
                reopen(self._paths, self._tracked, seed=self._seed, log=self._log, client=self._client, fresh=True)
            )

    def _own(self) -> dict[str, Any]:
        """The run's own part of the state: counters, position, generators."""
        return {
            "step": self._step,
            "epoch": self.data.epoch,
            "consumed": self._consumed_at_step,
            "finished": self._is_finished,
            "rng": rng.capture(),
        }

    def _set_own(self, own: dict[str, Any]) -> None:
        self._step, self._is_finished = own["step"], own["finished"]
        self._consumed_at_step = own["consumed"]
        self.data.seek(own["epoch"], own["consumed"])
        for problem in rng.restore(own["rng"]):
            self._log.emit(events.Mismatch(problems=[problem]))
        self._rng_to_set = own["rng"]

    def _state(self) -> dict[str, Any]:
        return {**{item.name: item.state() for item in self._tracked}, "stepwell": self._own()}

    # -- the loop -------------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers that are left, the running one first. Leaving it commits the end of the run and waits."""
        self._ensure_open()
        if self._is_finished and self.data.epoch >= count:
            self._log.emit(events.Finished(step=self._step, again=True))
            return
        self._is_finished = False
        for epoch in range(self.data.epoch, count):
            if epoch != self.data.epoch:
                self.data.seek(epoch, 0)
                self._consumed_at_step = 0
                self._epochs_since += 1
            yield epoch
        self._end_of_iteration()
        self.data.seek(count, 0)
        self._consumed_at_step = 0
        self._is_finished = True
        self.save().wait()
        self._log.emit(events.Finished(step=self._step, again=False))
        self.close()

    def _on_request(self) -> None:
        """The loop asks for a batch: everything of the iteration before it is over."""
        self._ensure_open()
        if not self._explicit:
            if self._delivered_since_step and not self._stepped and self._hooks and not self._said_look_ahead:
                self._said_look_ahead = True
                self._log.emit(events.LookAhead(step=self._step))
            self._end_of_iteration()
        if self._rng_to_set is not None:
            # iter(loader) may have drawn since restore(): set the generators again, where they were captured.
            rng.restore(self._rng_to_set)
            self._rng_to_set = None

    def _on_delivered(self) -> None:
        self._delivered_since_step += 1

    def step(self) -> None:
        """End of the loop body, for loops that do not iterate `ckpt.data` (or whose consumer reads ahead)."""
        self._ensure_open()
        self._explicit = True
        self._rng_to_set = None
        self._end_of_iteration()

    def _end_of_iteration(self) -> None:
        """Count a step if an optimizer stepped (without tracked optimizers: each batch or call), and ask the policy."""
        self._flush_log()
        stepped = self._stepped or (not self._hooks and (self._explicit or self._delivered_since_step > 0))
        self._hook_calls = 0
        if not stepped:
            return
        self._stepped = False
        self._delivered_since_step = 0
        self._step += 1
        self._consumed_at_step = self.data.consumed
        self._progress.update(self._step)
        self._after_step()

    def _after_step(self) -> None:
        moment = Moment(
            step=self._step,
            steps_since=self._step - max(0, self._saved_step),
            seconds_since=time.monotonic() - self._last_save_at,
            epochs_since=self._epochs_since,
            is_epoch_end=self.data.is_at_end,
        )
        if self._policy.is_due(moment):
            self._save(block=False)
        elif not self._snapshotter.pool.is_ready and self._step == self._reopened.first_step + 1:
            self._snapshotter.prepare(flatten(self._state()))

    def _on_optimizer_step(self, *_: Any) -> None:
        """The gate: runs before every step of a tracked optimizer."""
        self._snapshotter.gate()
        self._stepped = True
        self._hook_calls += 1
        if self._hook_calls > _STEPS_WITHOUT_TRIGGER and not self._warned_no_trigger:
            self._warned_no_trigger = True
            warnings.warn(
                f"{self._hook_calls} optimizer steps without a trigger: nothing is being checkpointed. Iterate `ckpt.data` "
                "instead of your loader, or call `ckpt.step()` at the end of the loop body",
                stacklevel=4,
            )

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Guard a change of tracked tensors that no optimizer hook sees: a custom step, a CUDA graph, an EMA."""
        self._ensure_open()
        self._snapshotter.gate()
        self._stepped = True
        yield

    def log(self, **values: Any) -> None:
        """Note values of the running step in the event log. Tensors are read one step later, so nothing waits."""
        self._ensure_open()
        kept = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        self._logged.append((self._step + 1, kept))

    def _flush_log(self) -> None:
        logged, self._logged = self._logged, []
        for step, values in logged:
            plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            self._log.emit(events.Log(step=step, values=plain))

    # -- saving ---------------------------------------------------------------------------------------------------------

    def save(self, *, name: str | None = None, files: dict[str, str | os.PathLike[str]] | None = None) -> SaveHandle:
        """Save now. Waits for memory and a free slot, not for the disk: see the handle.

        name:   keep this checkpoint for ever under this name
        files:  also store these files of yours; leave them unchanged until `upload_completion`
        """
        self._ensure_open()
        handle = self._save(block=True, name=name, files=files)
        assert handle is not None
        return handle

    def _save(
        self, *, block: bool, name: str | None = None, files: dict[str, str | os.PathLike[str]] | None = None
    ) -> SaveHandle | None:
        """state -> snapshot -> arena -> agent. Returns None if it was put off; the policy asks again after the next step."""
        try:
            flat = flatten(self._state())
        except StateError as error:
            if block:
                raise
            self._log.emit(events.SnapshotSkipped(step=self._step, reason=str(error)))
            self._last_save_at, self._saved_step = time.monotonic(), self._step
            return None
        taken = self._snapshotter.take(flat, self._meta(flat, name, files), block=block)
        if isinstance(taken, str):
            self._log.emit(events.SnapshotSkipped(step=self._step, reason=taken))
            return None
        self._last_save_at, self._saved_step, self._epochs_since = time.monotonic(), self._step, 0
        self._repeats[self._step] = self._repeats.get(self._step, -1) + 1
        return SaveHandle(self._step, taken.staged, self._upload(taken.sequence))

    def _meta(self, flat: Flat, name: str | None, files: dict[str, str | os.PathLike[str]] | None) -> dict[str, Any]:
        return {
            "step": self._step,
            "repeat": self._repeats.get(self._step, -1) + 1,
            "created": time.time(),
            "tree": flat.tree,
            "epoch_end": self.data.is_at_end or self._is_finished,
            "finished": self._is_finished,
            "name": name,
            "files": {key: str(Path(path).resolve()) for key, path in (files or {}).items()},
        }

    def _upload(self, sequence: int) -> Future[str]:
        return self._uploads.setdefault(sequence, Future())

    def _on_settled(self, inflight: Inflight) -> None:
        """Copier thread: a snapshot is complete, or void."""
        if inflight.void is not None:
            reason = f"snapshot of step {inflight.step} is void: {inflight.void.leaf} ({inflight.void.seen_by})"
            self._fail(inflight.sequence, PersistError(reason, step=inflight.step))
            self._last_save_at = float("-inf")  # the policy asks again at once; this time it is taken blocking
            self._saved_step = -(1 << 40)

    def _on_agent(self, message: Message) -> None:
        """Listening thread: the agent tells what became of a snapshot."""
        kind = message["type"]
        if kind == "durable":
            self._committed_step = message["step"]
            future = self._upload(message["sequence"])
            if not future.done():
                future.set_result(message["directory"])
        elif kind == "released":
            self._snapshotter.pool.release(message["sequence"])
            self._fail(message["sequence"], PersistError("given up: a newer snapshot took its place"))
            self._uploads.pop(message["sequence"], None)
        elif kind == "failed":
            self._is_fenced = self._is_fenced or message["fenced"]
            if message["final"]:
                self._fail(message["sequence"], PersistError(message["error"], step=message["step"]))
        elif kind == "chunk_done":
            self._snapshotter.acks.put()
        elif kind == "replaced":
            self._progress.update(self._step, agent_pid=message["pid"])
        elif kind == "lost":
            for sequence in list(self._uploads):
                self._fail(sequence, PersistError("the agent died again and again; see the log"))

    def _fail(self, sequence: int, error: PersistError) -> None:
        future = self._uploads.get(sequence)
        if future is not None and not future.done():
            future.set_exception(error)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every snapshot taken so far is committed. Raises PersistError for one that was given up."""
        self._snapshotter.drain()
        for future in list(self._uploads.values()):
            future.result(timeout)

    def status(self) -> Status:
        """Where the run stands."""
        return Status(
            step=self._step,
            epoch=self.data.epoch,
            committed_step=self._committed_step,
            pending=sum(1 for future in self._uploads.values() if not future.done()),
            agent_pid=self._client.pid,
            lineage=self._lineage,
            is_fenced=self._is_fenced,
        )

    # -- the end --------------------------------------------------------------------------------------------------------

    def close(self, *, save: bool = True) -> None:
        """Save the last step if it is not saved, wait until everything is durable, end the agent."""
        if not self._is_open or self._is_closed or os.getpid() != self._pid:
            self._is_closed = True
            return
        try:
            if save:
                self._end_of_iteration()
                if self._saved_step != self._step and self._step > self._reopened.first_step:
                    self.save()
        finally:
            self._is_closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()
        self._flush_log()
        self._snapshotter.drain()
        pending = [future for future in self._uploads.values() if not future.done()]
        finished = self._client.close(seconds=_CLOSE_SECONDS if pending else 10.0)
        self._snapshotter.close()
        self._progress.close()
        self._log.close()
        if pending and not (finished and all(future.done() for future in pending)):
            raise PersistError(
                f"{len(pending)} snapshots did not become durable within {_CLOSE_SECONDS:.0f} s; see the events"
            )

    def _at_exit(self) -> None:
        """The interpreter ends without close(): finish complete snapshots, leave no process. Nothing new is saved."""
        with contextlib.suppress(PersistError):
            self.close(save=False)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an exception the state may be half changed: what is on disk is better than what is in memory.
        self.close(save=kind is None)


def _directory(where: str | os.PathLike[str]) -> Path:
    override = os.environ.get("STEPWELL_WHERE")
    text = override or os.fspath(where)
    if "://" in text:
        raise ConfigError(f"{text}: object storage is not there yet; give a directory", found=text)
    return Path(text).absolute()


def _track(named: dict[str, Any], keywords: dict[str, Any], policy: Any, snapshot: str) -> list[Tracked]:
    """Check the options that catch mistakes, and wrap the tracked objects."""
    if not callable(getattr(policy, "is_due", None)):
        raise ConfigError(
            f"policy= is a {type(policy).__qualname__}, expected Every(...) or Never(); to track an object of that name "
            "use track={'policy': ...}"
        )
    if snapshot not in _STRATEGIES:
        raise ConfigError(
            f"snapshot={snapshot!r}: one of {', '.join(_STRATEGIES)}; to track an object of that name use track="
        )
    twice = sorted(named.keys() & keywords.keys())
    if twice:
        raise ConfigError(f"{twice[0]!r} is given both as a keyword and in track=", name=twice[0])
    if not (named or keywords):
        raise ConfigError("nothing to save: pass model=..., optimizer=... or track={...}")
    return track({**named, **keywords})
