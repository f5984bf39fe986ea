"""CheckFreq's own interface (msr-fiddle/CheckFreq): a script that uses it runs with only its import lines changed.

Owns:    the original's names, arguments and defaults, and what they mean here. `docs/checkfreq.md` has the whole map.
Not:     snapshots, files, frequencies: all of that is one `stepwell.Checkpointer`. The iterator is its own module.
Holds:   an argument that cannot be honoured is a warning or an error, never another meaning; what `restore()` returns,
         and the position in the data, come from the same checkpoint as the weights.

The loader is not given to the Checkpointer as data=: a script of the original's makes it after restore(), from what
that returned. So the iterator counts for itself, tells the Checkpointer with `step()`, and its position is tracked.
"""

from __future__ import annotations

import atexit
import builtins
import enum
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import stepwell
from stepwell.adapters.checkfreq.generators import Generators
from stepwell.adapters.checkfreq.iterator import CFIterator, public
from stepwell.adapters.checkfreq.moment import StateMoment
from stepwell.adapters.checkfreq.saved import BESIDE, Beside, CFCheckpoint
from stepwell.adapters.world import agree_on, this_rank
from stepwell.events.run_events import logger

if TYPE_CHECKING:
    from stepwell import LC, Deltas, Every, Node, Shared

__all__ = ["CFCheckpoint", "CFIterator", "CFManager", "CFMode", "enumerate"]

_ALL = 10**9
_OVERHEAD = 0.05
_COPY_SECONDS = 600.0
"""What the original's max_overhead=5 means; assumed by a restore() that comes before the CFIterator."""
_PREFIX = "model_v_"


class CFMode(enum.Enum):
    """Who decides when to checkpoint: the script (and `chk_freq`), or stepwell."""

    MANUAL = 0
    AUTO = 1


class enumerate(builtins.enumerate[Any]):
    """Python's own, but over a CFIterator that goes on in mid-epoch it counts on from the batches that were done.

    For scripts that compute the learning rate from the loop's counter, as the original's example does.
    """

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> enumerate:
        """As Python's."""
        done = iterable.count_from() if isinstance(iterable, CFIterator) else 0
        return super().__new__(cls, iterable, start + done)


class CFManager:
    """One run directory, and the checkpoints in it. Opened by `restore()`, or by the first batch or save."""

    chk_process = None
    """The original's scripts join it at their end. Nothing is left to join: the interpreter's exit waits."""

    def __init__(
        self,
        chk_dir: str,
        chk: CFCheckpoint,
        keep_epoch_chk: bool = True,
        overwrite: bool = True,
        mode: CFMode = CFMode.AUTO,
        chk_prefix: str = _PREFIX,
        *,
        memory: Every | None = None,
        levels: Sequence[Node | Shared] | None = None,
        deltas: LC | Deltas | None = None,
    ) -> None:
        """As the original, except that

        overwrite:   True keeps the newest two (the newest may turn out damaged), not one; False keeps all
        chk_prefix:  has no effect: checkpoints are directories named by their step
        memory, levels, deltas:  new, as `stepwell.Checkpointer` has them
        """
        if not isinstance(chk, CFCheckpoint):
            raise stepwell.ConfigError(
                f"CFManager(chk_dir, chk): chk is a {type(chk).__qualname__}, not a CFCheckpoint"
            )
        if chk_prefix != _PREFIX:
            warnings.warn(
                f"chk_prefix={chk_prefix!r} has no effect: a checkpoint is a directory named by its step", stacklevel=2
            )
        self.chk_dir, self.chk, self.mode = chk_dir, chk, mode
        self.overwrite, self.keep_epoch_chk = overwrite, keep_epoch_chk or not overwrite
        self._beside = Beside()
        self._stages: dict[str, Any] = {"memory": memory, "levels": levels, "deltas": deltas}
        self._ranks = this_rank().world_size
        self.updates = 0
        """Steps of tracked optimizers that this process made."""
        for one in chk.optimizers.values():
            if isinstance(one, torch.optim.Optimizer):
                one.register_step_post_hook(self._note_update)
        self._ckpt: stepwell.Checkpointer | None = None
        self._iterator: CFIterator | None = None
        self._generators: Generators | None = None
        self._opened_for = (0, _OVERHEAD)
        self._is_restored = self._is_resumed = False
        self.seed: int | None = None
        self._said_idle = False
        self._pid = os.getpid()
        """A forked child ends nothing."""

    # -- opening ------------------------------------------------------------------------------------------------------

    def restore(self, latest: bool = True, epoch: int = 0, gpu: int = 0) -> dict[str, Any] | None:
        """Bring back the newest good checkpoint, or (latest=False) the one taken when `epoch` epochs were done.

        Returns what was given to `save` with it, else the iterator's state; None if there is no checkpoint.

        gpu:  has no effect: every tensor is filled where it lives
        """
        step = None if latest else self._end_of(epoch)
        if not latest and step is None:
            return None
        ckpt = self.checkpointer()
        if not ckpt.restore(step=step):
            return None
        self._is_restored = True
        told, position = self._beside.given, self._beside.position
        self._beside.given = None
        self.seed = None if position is None else position["seed"]
        if position is not None and public(position)["epoch"] != position["epoch"]:
            logger.warning(
                "continuing with epoch %d: this checkpoint was saved after the last batch of epoch %d, and the code "
                "after the loop of that epoch (validation, a schedule) does not run again",
                position["epoch"] + 1,
                position["epoch"],
            )
        self._generators = Generators()
        if self._iterator is not None:
            self._resume(self._iterator)
        return told if told is not None or position is None else dict(public(position))

    def _end_of(self, epoch: int) -> int | None:
        """The step at which this many epochs were done; None if there is no checkpoint at all."""
        peek = Beside()
        with stepwell.Checkpointer(self.chk_dir, policy=stepwell.Never(), track={BESIDE: peek}) as reader:
            if not reader.restore(only=BESIDE):
                return None
        if epoch not in peek.ends:
            known = ", ".join(str(number) for number in sorted(peek.ends)) or "none"
            raise stepwell.RestoreError(
                f"{self.chk_dir}: there is no checkpoint from the end of epoch {epoch}; there are: {known}. restore() "
                "without latest=False takes the newest",
                path=str(self.chk_dir),
                epoch=epoch,
            )
        return peek.ends[epoch]

    def checkpointer(self) -> stepwell.Checkpointer:
        """The run. What it is to do follows from the mode and from the iterator, if there is one already."""
        if self._ckpt is None:
            self._beside.manager = self
            if self._iterator is not None:
                self._opened_for = (self._iterator.frequency, self._iterator.overhead)
            self._ckpt = stepwell.Checkpointer(
                self.chk_dir,
                policy=self._policy(),
                keep=2 if self.overwrite else _ALL,
                track={**self.chk.tracking_map, BESIDE: self._beside},
                **self._stages,
            )
            self._ckpt.data.is_placed_elsewhere = True
        return self._ckpt

    def _policy(self) -> Any:
        """MANUAL: none, the iterator saves by count. AUTO: the overhead's, unless a frequency is given."""
        if self.mode is CFMode.MANUAL:
            return stepwell.Never()
        if self._iterator is None:
            return stepwell.Auto(overhead=_OVERHEAD)
        frequency = self._iterator.frequency
        return stepwell.Every(steps=frequency) if frequency > 0 else stepwell.Auto(overhead=self._iterator.overhead)

    def attach(self, iterator: CFIterator) -> None:
        """An iterator belongs to this manager from now on; the first one after a restore goes to its position."""
        if self._iterator is not None:
            self._iterator.end_tail()
        is_first, self._iterator = self._iterator is None, iterator
        wanted = (iterator.frequency, iterator.overhead)
        if self._ckpt is not None and self.mode is CFMode.AUTO and wanted != self._opened_for:
            if not is_first:
                raise stepwell.ConfigError(
                    "another CFIterator has another chk_freq or max_overhead; use the same in the whole run"
                )
            self._open_again()
        self.checkpointer()  # before the first step: it hooks the optimizers
        if self._is_restored and not self._is_resumed:
            self._resume(iterator)

    def _resume(self, iterator: CFIterator) -> None:
        self._is_resumed = True
        iterator.resume(self._beside.position, self.step, self._generators)

    def _open_again(self) -> None:
        """restore() had to guess the frequency, and the iterator wants another one."""
        assert self._ckpt is not None
        step = self.step
        self._ckpt.close(save=False)
        self._ckpt = None
        if self._is_restored:
            warnings.warn(
                "CFIterator(chk_freq=, max_overhead=) after restore(): the checkpoint is read again, and changes to "
                "the tracked objects since then are lost. Create the CFIterator first, or change the objects later",
                stacklevel=4,
            )
            self.checkpointer().restore(step=step)
            self._generators = Generators()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def weight_update(self) -> None:
        """Step the tracked optimizer, whatever its name is; waits only for what is still being copied."""
        ckpt, found = self.checkpointer(), self.chk.optimizers
        if len(found) > 1 and "optimizer" in found:
            found = {"optimizer": found["optimizer"]}
        if len(found) != 1:
            raise stepwell.ConfigError(
                f"weight_update() steps one optimizer, but {len(found)} are tracked ({', '.join(found) or 'none'}): "
                "track one, name one of them `optimizer`, or call their step() yourself"
            )
        (optimizer,) = found.values()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()  # hooked
        else:
            with ckpt.updating():
                optimizer.step()
            self.updates += 1
        if self._iterator is None:
            self._count_alone(ckpt)

    def _count_alone(self, ckpt: stepwell.Checkpointer) -> None:
        """Without a CFIterator nobody ends the iterations: count them here, where nothing is saved by itself."""
        if self.mode is CFMode.MANUAL:
            ckpt.step()
        elif not self._said_idle:
            self._said_idle = True
            warnings.warn(
                "CFMode.AUTO saves through a CFIterator(..., cf_manager=manager), but there is none: only save() saves",
                stacklevel=3,
            )

    def save(
        self,
        additional_snapshot: dict[str, Any] | None = None,
        is_epoch: bool = False,
        epoch: int = 0,
        synchronous: bool = False,
        profile_full: bool = False,
        profile_snap: bool = False,
        use_thread: bool = False,
        persist: bool = False,
    ) -> tuple[float, float]:
        """Save now, in the background; returns the seconds until training could go on, and those of the whole call.

        synchronous, profile_full:  return when it is durable; raise PersistError if that fails
        is_epoch, epoch:            this many epochs are done: kept under that number, if `keep_epoch_chk`
        use_thread, persist:        have no effect: another process writes, and everything is synced to the disk
        profile_snap:               returns 0 as the second number; the checkpoint is written all the same
        """
        started = time.monotonic()
        name = f"epoch-{epoch}" if is_epoch and self.keep_epoch_chk else None
        ckpt = self.checkpointer()
        with self._beside.during(additional_snapshot, epoch if is_epoch else None):
            handle = ckpt.save(name=name)
        seconds = time.monotonic() - started
        if profile_snap:
            handle.staging_completion.result(_COPY_SECONDS)
            return time.monotonic() - started, 0.0
        if synchronous or profile_full:
            handle.wait()
        return seconds, time.monotonic() - started

    def save_cpu(
        self,
        additional_snapshot: dict[str, Any] | None = None,
        is_epoch: bool = False,
        epoch: int = 0,
        synchronous: bool = False,
        persist: bool = False,
        profile_snap: bool = False,
        profile_full: bool = False,
        use_thread: bool = True,
    ) -> tuple[float, float]:
        """As `save`: where the copy is taken, on the device or in host memory, is chosen by what is free and faster."""
        return self.save(
            additional_snapshot, is_epoch, epoch, synchronous, profile_full, profile_snap, use_thread, persist
        )

    # -- what can be asked --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done in the whole run."""
        return 0 if self._ckpt is None else self._ckpt.status().step

    def ask_position(self, restored: dict[str, Any] | None) -> dict[str, Any] | None:
        """Where in the data the last step left off; as it was restored, as long as there is no iterator."""
        return restored if self._iterator is None else self._iterator.position()

    @property
    def get_chk_size(self) -> float:
        """Size of the tracked tensors in MiB."""
        return sum(_tensor_bytes(target.state_dict()) for target in self.chk.tracking_map.values()) / (1 << 20)

    def close(self) -> None:
        """Save the end of an epoch that nothing followed, wait until everything is durable, end the agent.

        The interpreter's exit does it too.
        """
        atexit.unregister(self._at_exit)
        if self._ckpt is not None:
            if self._iterator is not None:
                self._iterator.end_tail(is_last=True)
            self._ckpt.close(save=False)

    def _at_exit(self) -> None:
        """Before the Checkpointer's own: after an exception the state may be half changed, and is not saved."""
        if os.getpid() == self._pid and getattr(sys, "last_type", None) is None and self._iterator is not None:
            self._iterator.end_tail(is_last=True)

    def note_end(self) -> StateMoment:
        """An epoch has ended. If nothing follows, the interpreter's exit saves it, before the Checkpointer's own."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        return StateMoment(self.chk.tracking_map.values())

    def has_changed(self, before: StateMoment, epoch: int | None) -> bool:
        """Whether anything that is saved is not as it was. Many ranks: rank 0 says it for all; at the end, yes."""
        if self._ranks > 1 and epoch is None:
            return True
        is_other = before != StateMoment(self.chk.tracking_map.values())
        return bool(agree_on(int(is_other), f"checkfreq/tail/{epoch}"))

    def _note_update(self, *_: Any) -> None:
        self.updates += 1


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
