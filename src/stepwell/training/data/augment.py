"""Randomness that belongs to a sample: the same draws for it wherever, and by whomever, it is read.

Owns:    seeding torch's, NumPy's and Python's global generators before a sample is read, and before a batch is put
         together, with a key of (seed, epoch, sample).
Holds:   nothing depends on the worker, their number, prefetching or the size of batches. The epoch travels with the
         indices, so that persistent workers cannot be late. Keys are hashed, never added up.

Each generator gets 32 bits of its own: torch's and NumPy's take no more.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import Dataset

_PERSON: Final = b"stepwell.aug/1"
_SEEDS: Final = struct.Struct("<III")
_COLLATE: Final = b"collate"
_SAMPLE, _PLACE = struct.Struct("<qq"), struct.Struct("<qqq")


class Ticket(NamedTuple):
    """What a worker is asked for: indices, and what makes their keys.

    indices:  of a batch; without batches, one index
    epochs:   of all samples, or of each
    number:   of the batch in its epoch, where a sampler may yield a sample twice: then its place makes the key
    """

    indices: Any
    epochs: int | list[int]
    number: int | None = None

    def each(self) -> list[bytes]:
        """The keys of a batch, one for each index."""
        if self.number is not None:
            return [_PLACE.pack(self.epochs, self.number, place) for place in range(len(self.indices))]
        if isinstance(self.epochs, int):
            return [_SAMPLE.pack(self.epochs, index) for index in self.indices]
        return [_SAMPLE.pack(epoch, index) for epoch, index in zip(self.epochs, self.indices, strict=True)]

    def one(self) -> bytes:
        """The key of the only index."""
        return _SAMPLE.pack(self.epochs, self.indices if self.number is None else self.number)


def seed_generators(secret: bytes, key: bytes) -> None:
    """Seed the global generators of this process from one hash."""
    digest = hashlib.blake2b(key, digest_size=12, key=secret, person=_PERSON).digest()
    for_torch, for_numpy, for_python = _SEEDS.unpack(digest)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would also go to every device
    random.seed(for_python)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(for_numpy)


class Keyed(Dataset[Any]):
    """A data set whose samples are read with generators seeded by their keys. Everything else is the data set's own."""

    def __init__(self, data: Any, seed: int) -> None:
        secret = hashlib.blake2b(f"{seed}".encode(), digest_size=32, person=_PERSON).digest()
        vars(self).update(_keyed_data=data, _keyed_secret=secret)

    def __getitem__(self, ticket: Ticket) -> Any:
        seed_generators(self._keyed_secret, ticket.one())
        return self._keyed_data[ticket.indices]

    def __getitems__(self, ticket: Ticket) -> Any:
        """torch's fetcher asks for a whole batch here, and then calls `collate_fn`."""
        data, secret, keys = self._keyed_data, self._keyed_secret, ticket.each()
        at_once = getattr(data, "__getitems__", None)
        items = []
        if at_once:
            if keys:
                seed_generators(secret, keys[0])
            items = at_once(ticket.indices)
        else:
            for key, index in zip(keys, ticket.indices, strict=True):
                seed_generators(secret, key)
                items.append(data[index])
        if keys:
            seed_generators(secret, keys[0] + _COLLATE)
        return items

    def __len__(self) -> int:
        return len(self._keyed_data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_keyed_")):  # also while it is unpickled, without its fields
            raise AttributeError(name)
        return getattr(self._keyed_data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """`worker_init_fn` opens files and keeps them on `get_worker_info().dataset`."""
        setattr(self._keyed_data, name, value)


def preserved(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, read in this process: its generators are afterwards as they were before."""
    numpy: Any = sys.modules.get("numpy")
    while True:
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        numpy_state = None if numpy is None else numpy.random.get_state()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
        yield batch
