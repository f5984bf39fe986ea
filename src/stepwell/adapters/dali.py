"""NVIDIA DALI iterators as data=.

DALI takes the state of a pipeline only when it is built, so a function of yours builds it, and is given the states:

    def make(checkpoints):                       # a list, one for each pipeline; None: from the start
        pipe = pipeline(enable_checkpointing=True, checkpoint=checkpoints and checkpoints[0])
        return DALIGenericIterator([pipe], ["image", "label"], reader_name="reader")

    ckpt = stepwell.Checkpointer("run", data=stepwell.adapters.dali.Resumable(make), ...)

Holds:   the next batch, and its random operations, are those of a run that was not stopped (DALI keeps them in its
         states). A resume costs what DALI needs to skip to its place in the epoch. Another data set, or another number
         of shards, is refused: DALI itself would go on somewhere. An `external_source` over an iterable keeps its own
         position: DALI does not know it, and warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
