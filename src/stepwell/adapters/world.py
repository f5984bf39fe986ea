"""The other ranks, as an adapter has to know them: how many, which one this is, and a number that all of them use."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from stepwell.types import Owner


def this_rank() -> Owner:
    """This process among those of torch.distributed."""
    is_ready = dist.is_available() and dist.is_initialized()
    return Owner(dist.get_rank(), dist.get_world_size()) if is_ready else Owner()


def agree_on(number: int, name: str) -> int:
    """Rank 0's number, on all ranks. No collective: rank 0 never waits, and others may ask at another moment."""
    owner = this_rank()
    if owner.is_alone:
        return number
    if owner.is_leader:
        tell(str(number), name)
        return number
    return int(hear(name))


def tell(text: str, name: str) -> None:
    """Leave a text for the other ranks."""
    store, key = _store(name)
    store.set(key, text)


def hear(name: str) -> str:
    """What a rank told, or will; waits as long as torch's store does. Raises torch's error then."""
    store, key = _store(name)
    return str(store.get(key).decode())


def forget(name: str) -> None:
    """All have heard it."""
    store, key = _store(name)
    store.delete_key(key)


def _store(name: str) -> tuple[Any, str]:
    from torch.distributed.distributed_c10d import _get_default_store

    # torchrun may keep the store over restarts: what an earlier start left there is not meant.
    return _get_default_store(), f"stepwell/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
