"""The other ranks, as an adapter has to know them: how many, which one this is, and a number that all of them use."""

from __future__ import annotations

import os

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
    from torch.distributed.distributed_c10d import _get_default_store

    # torchrun may keep the store over restarts: what an earlier start left there is not meant.
    store, key = _get_default_store(), f"stepwell/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if owner.is_leader:
        store.set(key, str(number))
        return number
    return int(store.get(key))
