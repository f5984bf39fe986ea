"""CheckFreq's resumable iterator: counts what the loop used, and ends an iteration at the next batch request.

Owns:    the position in the data and its form in a checkpoint, and the saves that MANUAL mode and epoch ends ask for.
Not:     files and frequencies (the manager, and through it the Checkpointer).
Holds:   a checkpoint's position is that of its last step: batches that were delivered and not used do not count. The
         end of an epoch is saved before what follows the loop (validation, a schedule), and once more when the next
         epoch begins, or the run ends, if that changed anything.

A torch DataLoader (map-style) and a list of batches begin anywhere, also where nothing is left: then a resume runs what
follows the loop. Any other iterable, a DALI iterator for instance, is counted only, and has to begin where `restore()`
said: at the next epoch, as the original's. Only the iterable itself decides when its epoch is over.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

import stepwell
from stepwell.adapters.checkfreq.generators import Generators
from stepwell.adapters.checkfreq.moment import StateMoment
from stepwell.adapters.checkfreq.reader_size import batch_size, has_read_all, whole_size
from stepwell.adapters.checkfreq.warned import warn
from stepwell.adapters.world import agree_on, this_rank
from stepwell.events.run_events import logger
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.source import LoaderSource, SequenceSource
from stepwell.training.data.source_choice import make_source

if TYPE_CHECKING:
    from stepwell.adapters.checkfreq import CFManager


_NOTHING: Any = object()
_COUNTERS = (
    "continuing at batch {batch} of epoch {epoch}: enumerate() in the loop starts at 0 again, so a learning rate "
    "computed from it is wrong; `from stepwell.adapters.checkfreq import enumerate` starts at {batch}"
)


class _At(NamedTuple):
    """A position: batches and samples of the epoch, and batches of the run."""

    epoch: int
    iter: int
    start_index: int
    steps_so_far: int


class CFIterator:
    """Wraps the loader of the training loop. The arguments are the original's; `docs/checkfreq.md` has each."""

    def __init__(
        self,
        dataloader: Any,
        bs: int = 128,
        dali: bool = True,
        steps_this_epoch: int = 0,
        epoch: int = 0,
        arch: str = "resnet18",
        worker_id: int = 0,
        chk_freq: int = 0,
        steps_to_run: int = -1,
        max_overhead: float = 5,
        dynamic: bool = False,
        persist: bool = True,
        cf_manager: CFManager | None = None,
    ) -> None:
        """As the original, except that

        bs:           counts samples of iterables that cannot be asked; a DataLoader's own batch size goes first
        chk_freq:     in AUTO mode: this frequency, in steps, instead of the automatic one (there, it was ignored)
        dynamic:      has no effect: the automatic frequency always follows what it measures
        persist:      False has no effect: everything is synced to the disk
        dali, arch:   have no effect: what the loader is can be seen, and no profile is kept in the working directory
        worker_id:    0, or the (local) rank of this process: every rank has its part in each checkpoint
        """
        _check(dataloader, worker_id, chk_freq, cf_manager, persist)
        self._dataloader, self._manager = dataloader, cf_manager
        self._is_seekable = isinstance(dataloader, DataLoader | Sequence)
        self._batch_size = batch_size(dataloader, bs)
        self._source: LoaderSource | SequenceSource | None = None
        self._steps_to_run, self._steps_this_run = steps_to_run, 0
        self._since_save = 0
        self._exit = False
        self._updates = 0
        self.frequency, self.overhead = chk_freq, max_overhead / 100
        samples = steps_this_epoch * self._batch_size * getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
        self._at = _At(epoch, steps_this_epoch, samples, epoch * (self._batches_of_epoch() or 0) + steps_this_epoch)
        self._restored: _At | None = None
        self._used, self._used_step = self._at, 0
        self._generators: Generators | None = None
        self._batches: Iterator[Any] | None = None
        self._is_delivered = self._is_exhausted = False
        self._is_end_saved = True
        self._tail: StateMoment | None = None
        self._is_size_right = True
        self._resumed_at = 0
        if cf_manager is not None:
            cf_manager.attach(self)

    # -- where in the data --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Batches and samples delivered in this epoch, batches in the run, epochs done."""
        at = self._at
        return {"iter": at.iter, "steps_so_far": at.steps_so_far, "start_index": at.start_index, "epoch": at.epoch}

    def load_state_dict(self, chk_map: dict[str, Any] | None) -> None:
        """Go to a position; None (nothing was restored) leaves it as it is. Takes effect at the next `iter`."""
        if chk_map is None:
            return
        missing = [key for key in ("iter", "steps_so_far", "start_index", "epoch") if key not in chk_map]
        if missing:
            raise stepwell.ConfigError(
                f"CFIterator.load_state_dict: {', '.join(missing)} missing; give what CFIterator.state_dict() returned "
                "(restore() returns the map that was given to save(); put the iterator's state into that)"
            )
        self._go(_At(chk_map["epoch"], chk_map["iter"], chk_map["start_index"], chk_map["steps_so_far"]))

    def _go(self, at: _At) -> None:
        self._at = self._used = at
        self._batches, self._is_delivered, self._is_end_saved, self._tail = None, False, True, None

    def resume(self, position: dict[str, Any] | None, step: int, generators: Generators | None) -> None:
        """The manager restored this position, of this step."""
        self._generators, self._used_step = generators, step
        if position is None:
            return
        self._restored = restored = _At(**public(position))
        self._resumed_at = restored.iter
        if self._is_seekable:
            self._check_drift(position)
            if self._at[:2] not in ((0, 0), restored[:2]):
                raise stepwell.ConfigError(
                    f"CFIterator(epoch={self._at.epoch}, steps_this_epoch={self._at.iter}): the checkpoint is at epoch "
                    f"{restored.epoch}, batch {restored.iter}; leave both out"
                )
            self._go(restored)

    def _check_drift(self, position: dict[str, Any]) -> None:
        source, length = self._open_source(), position["length"]
        if position["iter"] and (source.length(), source.order) != (length, position["order"]):
            raise stepwell.DataError(
                f"the checkpoint is in epoch {position['epoch']} of {length} samples in the order "
                f"{position['order']}, but the data has {source.length()} samples in the order {source.order}: some "
                "would be used twice or never. Pass the same data as before"
            )

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps: where its last step left off, and what the order depends on."""
        self._mark()
        at, source = self._used, self._source
        order = {"order": source.order, "length": source.length()} if source else {"order": None, "length": None}
        seed = None if self._manager is None else self._manager.seed
        ended = at == self._at and self._is_over()
        return {**at._asdict(), **order, "seed": seed, "ended": ended, "seekable": self._is_seekable}

    def count_from(self) -> int:
        """Where a counter of the loop's own has to begin: batches of this epoch that came before. `enumerate` asks."""
        self._resumed_at = 0
        return self._at.iter

    def _mark(self) -> None:
        """If there was a step since the last look, it has used everything delivered."""
        assert self._manager is not None
        step = self._manager.step
        if step != self._used_step:
            self._used_step, self._used = step, self._at

    # -- the data -----------------------------------------------------------------------------------------------------

    def _open_source(self) -> LoaderSource | SequenceSource:
        """The one place that turns a loader into something that begins anywhere."""
        if self._source is None:
            known = None if self._manager is None else self._manager.seed
            seed = agree_on(torch.initial_seed(), "checkfreq/seed") if known is None else known
            source = make_source(self._dataloader, seed, emit=warn, owner=this_rank())
            if not isinstance(source, LoaderSource | SequenceSource):
                raise stepwell.DataError(
                    f"CFIterator: a {type(self._dataloader).__qualname__} keeps its own position, which the CheckFreq "
                    "interface cannot restore; give it to stepwell.Checkpointer(data=...) and iterate ckpt.data"
                )
            self._source = source
            if self._manager is not None:
                self._manager.seed = seed  # for the next process, and for an iterator that follows this one
        return self._source

    def __iter__(self) -> CFIterator:
        """What is left of the epoch."""
        if self._is_seekable:
            self._batches = self._open_source().open(Cursor(self._at.epoch, self._at.iter, self._at.start_index))
        else:
            self._check_start()
            self._batches = iter(self._dataloader)
        return self

    def _check_start(self) -> None:
        """Only its owner can have brought a foreign iterator to a position; nothing said means that nobody did."""
        restored, self._restored = self._restored, None
        if restored is not None and restored[:2] != self._at[:2]:
            raise stepwell.ConfigError(
                f"the run was restored at epoch {restored.epoch}, batch {restored.iter}, but the iterator of type "
                f"{type(self._dataloader).__qualname__} starts at epoch {self._at.epoch}, batch {self._at.iter}: "
                "create it with resume_index=state['start_index'], resume_epoch=state['epoch'] from what restore() "
                "returned, and call CFIterator.load_state_dict(state)"
            )

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        batch = self._look_ahead()
        self._end_iteration()
        self.end_tail()
        if 0 <= self._steps_to_run <= self._steps_this_run:
            self._exit = True
            if self._is_over():
                self._end_epoch()
            raise StopIteration
        if self._generators is not None:  # after `iter`, before anything of the batch is drawn
            self._generators.set()
            self._generators = None
        if batch is _NOTHING and not self._is_over():
            batch = next(self._batches, _NOTHING)
        if batch is _NOTHING:
            self._end_epoch()
            raise StopIteration
        if self._resumed_at:
            logger.info(_COUNTERS.format(batch=self._resumed_at, epoch=self._at.epoch))
            self._resumed_at = 0
        self._count()
        return batch

    def _look_ahead(self) -> Any:
        """Fetch early where the epoch may be over: a checkpoint has to know whether anything is left.

        What an iterable says of its size is a hint. It is not believed where a batch would be lost.
        """
        assert self._batches is not None
        is_going_on = self._is_size_right and self._batches_of_epoch() is not None and not self._seems_over()
        if self._is_seekable or self._is_exhausted or is_going_on:
            return _NOTHING
        batch = next(self._batches, _NOTHING)
        self._is_exhausted = batch is _NOTHING
        self._is_size_right = self._is_size_right and (self._is_exhausted or not self._seems_over())
        return batch

    def _count(self) -> None:
        at, source = self._at, self._source
        if source is not None and source.size():
            samples = source.after(Cursor(at.epoch, at.iter, at.start_index)).samples
        else:
            samples = at.start_index + self._batch_size
        self._at = _At(at.epoch, at.iter + 1, samples, at.steps_so_far + 1)
        self._steps_this_run += 1
        self._since_save += 1
        self._is_delivered, self._is_end_saved = True, False
        self._updates = 0 if self._manager is None else self._manager.updates

    def _is_over(self) -> bool:
        """Whether nothing is left of the epoch, as far as that is known."""
        if self._source is not None:
            return self._source.is_over(Cursor(self._at.epoch, self._at.iter, self._at.start_index))
        return self._is_exhausted or (self._is_size_right and not self._is_seekable and self._seems_over())

    def _seems_over(self) -> bool:
        batches = self._batches_of_epoch()
        return has_read_all(self._dataloader) or (batches is not None and self._at.iter >= batches)

    def _batches_of_epoch(self) -> int | None:
        if self._is_seekable:
            with contextlib.suppress(TypeError):  # a sampler that does not say how long it is
                return len(self._dataloader)
            return None
        size = whole_size(self._dataloader)
        return math.ceil(size / self._batch_size) if size > 0 else None

    # -- the ends -----------------------------------------------------------------------------------------------------

    def _end_iteration(self) -> None:
        """A batch is asked for: everything of the iteration before is over. The Checkpointer's policy decides here."""
        if not self._is_delivered or self._manager is None:
            return
        self._is_delivered = False
        before, is_over = self._manager.step, self._is_over()
        if not is_over or not self._manager.chk.is_hooked:
            self._manager.checkpointer().step()
            self._mark()
        if is_over:
            self._save_end()  # it ends the iteration too, so that a policy that is due does not save it once more
        elif self._manager.step != before and self._is_manual and 0 < self.frequency <= self._since_save:
            self._save_surely(synchronous=True)

    def _end_epoch(self) -> None:
        if not self._is_end_saved and self._manager is not None:
            self._save_end()
        at, samples = self._at, 0
        if self._source is not None:  # a tail that is carried over is consumed already
            samples = self._source.following(Cursor(at.epoch, at.iter, at.start_index)).samples
        self._go(_At(at.epoch + 1, 0, samples, at.steps_so_far))
        self._since_save, self._is_exhausted = 0, False
        if self._manager is not None and at.iter > 0:
            self._tail = self._manager.note_end()

    def end_tail(self, *, is_last: bool = False) -> None:
        """What followed the loop of an epoch is over: the next epoch begins, or (is_last) the run ends."""
        if self._tail is None or self._manager is None:
            return
        if self._has_gradient:
            return  # after the next step it is in the weights
        before, self._tail = self._tail, None
        if self._manager.has_changed(before, None if is_last else self._at.epoch):
            self._save_surely(synchronous=self._is_manual)

    @property
    def _has_gradient(self) -> bool:
        """Whether no step followed the last batch: its gradient is not in the weights yet."""
        manager = self._manager
        return manager is not None and manager.chk.is_hooked and manager.updates == self._updates

    @property
    def _is_manual(self) -> bool:
        return self._manager is not None and self._manager.mode.value == 0

    def _save_end(self) -> None:
        self._is_end_saved = True
        is_synchronous = self._is_manual and not self._has_gradient  # else it is taken after the gradient's step
        self._save_surely(synchronous=is_synchronous, is_epoch=True, epoch=self._at.epoch + 1)

    def _save_surely(self, **options: Any) -> None:
        """Training goes on when a checkpoint fails; the next one is tried."""
        assert self._manager is not None
        self._since_save = 0
        try:
            self._manager.save(**options)
        except stepwell.StepwellError as error:
            warnings.warn(f"no checkpoint at step {self._manager.step}: {error}. Training continues", stacklevel=4)

    def reset(self) -> None:
        """Ready for the next epoch."""
        if hasattr(self._dataloader, "reset"):
            self._dataloader.reset()

    @property
    def exit(self) -> bool:
        """Whether `steps_to_run` batches were delivered."""
        return self._exit

    @property
    def _size(self) -> int:
        """Samples of an epoch, as the original's scripts ask for it."""
        source = self._open_source() if self._is_seekable else None
        if source is None:
            return int(whole_size(self._dataloader))
        return source.length() or len(self._dataloader) * self._batch_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        batches = self._batches_of_epoch()
        if batches is None:
            raise TypeError(f"a {type(self._dataloader).__qualname__} has no length")
        return batches


def _check(dataloader: Any, worker_id: int, chk_freq: int, manager: Any, persist: bool) -> None:
    if not isinstance(dataloader, Iterable):
        raise stepwell.ConfigError(f"CFIterator: a {type(dataloader).__qualname__} is not iterable")
    owner, local = this_rank(), os.environ.get("LOCAL_RANK", "0")
    if worker_id != 0 and (owner.is_alone or str(worker_id) not in (str(owner.rank), local)):
        raise stepwell.ConfigError(
            f"CFIterator(worker_id={worker_id}): this process is rank {owner.rank} of {owner.world_size}; call "
            "torch.distributed.init_process_group() first, and give its local rank or leave worker_id out",
            found=worker_id,
        )
    if chk_freq > 0 and manager is None:
        raise stepwell.ConfigError(f"CFIterator(chk_freq={chk_freq}): cannot save without cf_manager=")
    if not persist:
        warnings.warn("persist=False has no effect: every checkpoint is synced to the disk", stacklevel=3)


def public(position: dict[str, Any]) -> dict[str, int]:
    """The original's four values. Where nothing is left: the next epoch, as there.

    A loader that can begin anywhere ends its epoch once more instead, so that what follows the loop runs.
    """
    found = {key: position[key] for key in _At._fields}
    if position["ended"] and not position.get("seekable", position["length"] is not None):
        found |= {"epoch": found["epoch"] + 1, "iter": 0, "start_index": 0}
    return found
