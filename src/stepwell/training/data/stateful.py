"""Sources that know their own position: what has `state_dict` and `load_state_dict`.

Owns:    asking such a source where it is, and giving it back what it said.
Holds:   it is asked when a checkpoint is taken, not for every batch: that may be expensive. After loading, it has to
         tell what it was given; one that does not would go on somewhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from stepwell.errors import DataError
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.sampler import CountsBatches, epoch_seed
from stepwell.training.data.source import rebuilt


def has_state(data: Any) -> bool:
    """Whether an object tells and takes its state."""
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


class StatefulSource(CountsBatches):
    """Iterated as it is; `owner` holds the state. `order` names its class, since only that one understands it."""

    def __init__(self, batches: Any, owner: Any, exactness: str = "order") -> None:
        self._batches, self._owner, self.exactness = batches, owner, exactness
        self.order = type(owner).__qualname__

    def open(self, at: Cursor) -> Iterator[Any]:
        """The source is there already: `at` only counts."""
        return iter(self._batches)

    def left(self, at: Cursor) -> int | None:
        try:
            return max(0, len(self._batches) - at.batches)
        except (TypeError, NotImplementedError):
            return None

    def state(self) -> Any:
        """What the source says of itself now."""
        return self._owner.state_dict()

    def load(self, state: Any, *, ended: int | None) -> None:
        """Give the source a state, of the end of epoch `ended` if that is not None.

        Raises DataError if it refuses the state, or tells another one afterwards.
        """
        name = type(self._owner).__qualname__
        try:
            self._owner.load_state_dict(state)
            echo = self._owner.state_dict()
        except Exception as error:  # the user's code: whatever it says is about this state
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise DataError(
                f"{name}.load_state_dict refused the state of the checkpoint ({reason}): create the data as "
                "it was then, with the same number of workers",
                found=name,
            ) from error
        if not alike(state, echo):
            raise DataError(
                f"{name} returns another state than it was given: it would continue somewhere else in the "
                "data. Its load_state_dict must apply all that state_dict returns, before the first batch; "
                "restore(before=...) takes an older checkpoint",
                found=name,
            )


class IterableSource(StatefulSource):
    """A torch DataLoader, without workers, over an IterableDataset that has a state.

    A data set that ends inside a short batch is in its next epoch when that batch is delivered: its state does not say
    that nothing is left of this one, so we do.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._generator, self._seed = torch.Generator(), seed
        self._epoch, self._ended = 0, -1
        options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        batches = rebuilt(loader, self._generator, dataset=_Watched(loader.dataset, self._note_end), **options)
        super().__init__(batches, loader.dataset, "exact")

    def _note_end(self) -> None:
        self._ended = self._epoch

    def open(self, at: Cursor) -> Iterator[Any]:
        self._epoch = at.epoch
        if self._ended == at.epoch:
            return iter(())
        self._generator.manual_seed(epoch_seed(self._seed, at.epoch))
        return iter(self._batches)

    def is_over(self, at: Cursor) -> bool:
        return self._ended == at.epoch or super().is_over(at)

    def load(self, state: Any, *, ended: int | None) -> None:
        super().load(state, ended=ended)
        self._ended = -1 if ended is None else ended


class _Watched(IterableDataset[Any]):
    """A data set that tells when it has come to its end."""

    def __init__(self, data: Any, on_end: Callable[[], None]) -> None:
        self._data, self._on_end = data, on_end

    def __iter__(self) -> Iterator[Any]:
        yield from self._data
        self._on_end()

    def __len__(self) -> int:
        return len(self._data)


def alike(left: Any, right: Any) -> bool:
    """Whether two states are the same, tensors and arrays in them too."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and (isinstance(left, numpy.ndarray) or isinstance(right, numpy.ndarray)):
        return bool(numpy.array_equal(left, right))
    return bool(left == right or (left != left and right != right))
