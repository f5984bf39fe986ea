"""NVIDIA DALI: any of its iterators as data=, and a file reader that begins at any sample of any epoch.

`Resumable`: DALI takes the state of a pipeline only when it is built, so a function of yours builds it, and is given
the states:

    def make(checkpoints):                       # a list, one for each pipeline; None: from the start
        pipe = pipeline(enable_checkpointing=True, checkpoint=checkpoints and checkpoints[0])
        return DALIGenericIterator([pipe], ["image", "label"], reader_name="reader")

    ckpt = stepwell.Checkpointer("run", data=stepwell.adapters.dali.Resumable(make), ...)

The next batch, and its random operations, are those of a run that was not stopped (DALI keeps them in its states). A
resume costs what DALI needs to skip to its place in the epoch. Another data set, or another number of shards, is
refused: DALI itself would go on somewhere. An `external_source` over an iterable keeps its own position: DALI does not
know it, and warns.

`FileReader` has the arguments that CheckFreq's patch of DALI added: resume_index, resume_epoch, cf_det. Stock readers
shuffle what they shuffled before and start at zero. Here an external source computes which files come next, from (seed,
epoch), at any position at once, and `fn.io.file.read` reads them in DALI's own threads. The random operators of a
pipeline begin anew at every start; what is computed from the reader's `draws` belongs to the sample and comes back.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import stepwell
from stepwell.training.data.permutation import Permutation

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".pnm", ".ppm", ".pgm", ".pbm", ".jp2", ".webp")
_MOST_DRAWS = 16
_READER = ("epoch_size", "number_of_shards", "shard_id")


class Resumable:
    """What `make` builds, with a state. Built at the first use."""

    exactness = "exact"

    def __init__(self, make: Callable[[list[bytes] | None], Any]) -> None:
        self._make = make
        self._built: Any = None
        self._batches = 0
        self._loaded: list[bytes] | None = None

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch."""
        iterator, was_loaded = self._iterator(), self._loaded is not None
        self._loaded = None
        if was_loaded and self._batches >= len(iterator):
            self._batches = 0  # built in a state of the end of an epoch, DALI begins the next one
            return
        for batch in iterator:
            self._batches += 1
            yield batch
        self._batches = 0
        if iterator._auto_reset in (False, "no"):
            iterator.reset()

    def __len__(self) -> int:
        return len(self._iterator())

    def state_dict(self) -> dict[str, Any]:
        """What DALI tells of its pipelines, and of what they read."""
        iterator = self._iterator()
        states = self._loaded or list(iterator.checkpoints())  # at the end of an epoch it tells them otherwise
        return {"checkpoints": states, "readers": _readers(iterator), "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Build everything anew in this state."""
        self._loaded, self._batches = list(state["checkpoints"]), state["batches"]
        self._built = self._make(list(state["checkpoints"]))

    def _iterator(self) -> Any:
        if self._built is None:
            self._built = self._make(None)
        return self._built


def _readers(iterator: Any) -> list[dict[str, dict[str, int]]]:
    """The readers of each pipeline: how much they read, and which shard."""
    return [
        {name: {key: int(meta[key]) for key in _READER} for name, meta in pipe.reader_meta().items()}
        for pipe in iterator._pipes
    ]


class FileReader:
    """Called in a pipeline's definition it gives the nodes (files, labels), or with `draws` (files, labels, draws)."""

    def __init__(
        self,
        file_root: str | None = None,
        *,
        files: Sequence[str] | None = None,
        labels: Sequence[int] | None = None,
        shard_id: int = 0,
        num_shards: int = 1,
        random_shuffle: bool = False,
        shuffle_after_epoch: bool = True,
        seed: int = 0,
        resume_index: int = 0,
        resume_epoch: int = 0,
        cf_det: bool = True,
        draws: int = 0,
    ) -> None:
        """The files of a folder (CLASS/picture, labels in the order of the class names), or those of a list.

        resume_index:  samples of this shard that are consumed already; all of them: the next epoch begins
        resume_epoch:  the epoch they belong to
        cf_det:        False has no effect: the order always depends on seed and epoch alone
        draws:         numbers in [0, 1) for each sample, from (seed, epoch, sample): 16 at most
        """
        if (file_root is None) == (files is None):
            raise stepwell.ConfigError("FileReader: give either file_root= or files=")
        if not 0 <= shard_id < num_shards:
            raise stepwell.ConfigError(f"FileReader(shard_id={shard_id}, num_shards={num_shards}): no such shard")
        if not 0 <= draws <= _MOST_DRAWS or resume_index < 0 or resume_epoch < 0:
            raise stepwell.ConfigError(
                f"FileReader(resume_index={resume_index}, resume_epoch={resume_epoch}, draws={draws}): give numbers "
                f"from 0 on, and at most {_MOST_DRAWS} draws"
            )
        if not cf_det:
            warnings.warn("cf_det=False has no effect: the order depends on seed and epoch alone", stacklevel=2)
        self.classes: list[str] = []
        if file_root is not None:
            self.classes, files, labels = _folder(Path(file_root))
        assert files is not None
        self._files, self._labels = list(files), list(labels or [0] * len(files))
        if not self._files or len(self._files) != len(self._labels):
            raise stepwell.DataError(f"{file_root or 'files='}: {len(self._files)} files, {len(self._labels)} labels")
        self._first = len(self._files) * shard_id // num_shards
        self._last = len(self._files) * (shard_id + 1) // num_shards
        self._is_shuffled, self._seed = random_shuffle or shuffle_after_epoch, seed
        is_over = resume_index >= self.epoch_size()
        self._start = (resume_epoch + 1, 0) if is_over else (resume_epoch, resume_index)
        self._draws = draws
        self._batch_size = 0
        self._order: tuple[int, Permutation] | None = None

    def epoch_size(self) -> int:
        """Samples of this shard in a whole epoch."""
        return self._last - self._first

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """The numbers of the samples at these positions of the shard."""
        positions = torch.arange(self._first + start, self._first + min(stop, self.epoch_size()))
        if self._is_shuffled:
            if self._order is None or self._order[0] != epoch:
                self._order = epoch, Permutation(len(self._files), seed=self._seed, epoch=epoch)
            positions = self._order[1].at(positions)
        return [int(number) for number in positions]

    def batch(self, number: int, later_epochs: int) -> tuple[list[Any], ...]:
        """The batch of this number since the start of the epoch that began so many resets ago; raises StopIteration."""
        epoch, index = self._start
        epoch, index = epoch + later_epochs, 0 if later_epochs else index
        start = index + number * self._batch_size
        if start >= self.epoch_size():
            raise StopIteration
        numpy = import_module("numpy")
        chosen = self.samples(epoch, start, start + self._batch_size)
        names = [numpy.frombuffer(self._files[sample].encode(), dtype=numpy.uint8) for sample in chosen]
        labels = [numpy.array([self._labels[sample]], dtype=numpy.int32) for sample in chosen]
        if not self._draws:
            return names, labels
        return names, labels, [self._draw(numpy, epoch, sample) for sample in chosen]

    def _draw(self, numpy: Any, epoch: int, sample: int) -> Any:
        text = f"stepwell.draws:{self._seed}:{epoch}:{sample}".encode()
        digest = hashlib.blake2b(text, digest_size=4 * self._draws).digest()
        return (numpy.frombuffer(digest, dtype="<u4") >> 8).astype(numpy.float32) / numpy.float32(1 << 24)

    def __call__(self, name: str | None = None) -> tuple[Any, ...]:
        """Only while a pipeline is defined. `name` is the name of the source in DALI's messages."""
        dali = import_module("nvidia.dali")
        fn, types = import_module("nvidia.dali.fn"), dali.types
        self._batch_size = dali.Pipeline.current().max_batch_size
        names, *others = fn.external_source(
            lambda info: self.batch(info.iteration, info.epoch_idx),
            num_outputs=3 if self._draws else 2,
            batch=True,
            batch_info=True,
            dtype=[types.UINT8, types.INT32, types.FLOAT][: 3 if self._draws else 2],
            ndim=[1, 1, 1][: 3 if self._draws else 2],
            name=name,
        )
        return fn.io.file.read(names), *others


def _folder(root: Path) -> tuple[list[str], list[str], list[int]]:
    try:
        classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        found = [
            (str(path), label)
            for label, name in enumerate(classes)
            for path in sorted(root.joinpath(name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
    except OSError as error:
        raise stepwell.DataError(
            f"{root}: {error.strerror}; file_root= is a folder of classes", path=str(root)
        ) from error
    if not found:
        raise stepwell.DataError(f"{root}: contains no pictures; file_root= is a folder of classes", path=str(root))
    return classes, [path for path, _ in found], [label for _, label in found]
