"""`stepwell.DataLoader`: torch's loader with an order, an end of the epoch, and randomness that can be resumed.

`Checkpointer(data=...)` also resumes a plain torch DataLoader. This one adds choices: the end of an epoch (`tail`),
ranks, and randomness by sample (`keyed`) even without workers. Without a Checkpointer, iterating it yields the rest of
the epoch, and `state_dict` returns its position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from stepwell.errors import ConfigError, DataError
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.cut import TAILS, Cut
from stepwell.training.data.sampler import PlainSampler
from stepwell.training.data.source import LoaderSource
from stepwell.types import Owner


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A torch DataLoader over a map-style data set that can resume at any batch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        tail: str = "carry",
        keyed: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """All other options are those of torch's loader.

        tail:   the last samples of an epoch, too few for a batch: `carry` them over into the next epoch, `drop` them,
                yield a `partial` batch, or `pad` it with samples that are then used twice
        keyed:  seed the generators for each sample by (seed, epoch, sample); None: only with workers
        rank, world_size:  yield the batches of this rank; `batch_size` is per rank. None: those of the run, or one rank
        seed:   of order and randomness; None: the seed of the run, or 0 without one
        """
        if tail not in TAILS:
            raise ConfigError(f"tail={tail!r}: give one of {', '.join(TAILS)}", name="tail")
        if (rank is None) != (world_size is None):
            raise ConfigError("give rank= and world_size= both, or neither", name="rank")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} of world_size={world_size}: ranks count from 0", name="rank")
        if extra := sorted({"sampler", "batch_sampler", "drop_last"} & options.keys()):
            raise ConfigError(f"{extra[0]}= belongs to torch's own DataLoader; here, use shuffle= and tail= instead")
        if isinstance(dataset, IterableDataset):
            raise ConfigError("an IterableDataset has no positions; give a map-style data set", name="dataset")
        drop_last = tail == "drop" and batch_size is not None
        super().__init__(dataset, batch_size, shuffle, drop_last=drop_last, **options)
        self._cut = Cut(batch_size or 1, tail, rank or 0, world_size or 1)
        self._has_rank = rank is not None
        self._is_shuffled, self._is_keyed, self._seed = shuffle, keyed, seed
        self._alone: LoaderSource | None = None
        self._at = Cursor()
        self._has_delivered, self._rounds = False, 0

    def source(self, seed: int, owner: Owner | None = None) -> LoaderSource:
        """What a run reads from; seed and rank are the run's, where none were given."""
        if owner is not None and not self._has_rank:
            self._cut = self._cut._replace(rank=owner.rank, world_size=owner.world_size)
        seed = seed if self._seed is None else self._seed
        keyed = self.num_workers > 0 if self._is_keyed is None else self._is_keyed
        order, batched = seed if self._is_shuffled else None, self.batch_size is not None
        sampler = PlainSampler(self.dataset, self._cut, order, batched=batched, keyed=keyed)  # type: ignore[arg-type]
        return LoaderSource(self, seed, keyed=keyed, sampler=sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        source = self._opened()
        if self._has_delivered and source.is_over(self._at):  # to somebody who stopped after `len()` batches
            self._at = source.following(self._at)
        self._has_delivered = False
        self._rounds += 1
        return self._deliver(source, self._at, self._rounds)

    def _deliver(self, source: LoaderSource, at: Cursor, round: int) -> Iterator[Any]:
        """Each iterator has its own place; where the loader is, is where the newest one is."""
        for batch in source.open(at):
            at = source.after(at)
            if round == self._rounds:
                self._at, self._has_delivered = at, True
            yield batch
        if round == self._rounds:
            self._at, self._has_delivered = source.following(at), False

    def __len__(self) -> int:
        """Batches of a whole epoch that begins with its first sample."""
        return self._cut.left(Cursor(), len(self.dataset))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Where it is: what was delivered counts, what workers read ahead does not."""
        source = self._opened()
        return {**self._at._asdict(), "length": source.length(), "order": source.order, "seed": self._seed or 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called. Raises DataError if that is another place now."""
        at = Cursor(state["epoch"], state["batches"], state["samples"])
        self._at, before = at, self._at
        self._has_delivered = False
        for name, now in self.state_dict().items():
            if at.samples and state[name] != now:
                self._at = before
                raise DataError(
                    f"{name} was {state[name]!r} and is {now!r}: some samples would be used twice or never; pass "
                    "the same data as before",
                    expected=state[name],
                    found=now,
                )

    def _opened(self) -> LoaderSource:
        if self._alone is None:
            self._alone = self.source(0)
        return self._alone
