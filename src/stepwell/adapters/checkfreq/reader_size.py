"""What an iterable says of its size, in the words of DALI's iterators, stock ones and those that CheckFreq patched.

`_size` is the number of samples in an epoch, or -1; `_counter` counts what was read of them. CheckFreq's patch adds
`resume_size`: then `_size` is what is left of the first epoch, `_orig_size` a whole one, up to the first `reset()`.
"""

from __future__ import annotations

from typing import Any


def batch_size(dataloader: Any, bs: int) -> int:
    """Samples in a batch; `bs` where the loader does not say."""
    own = getattr(dataloader, "batch_size", None)
    return own if isinstance(own, int) and own > 0 else bs


def whole_size(dataloader: Any) -> int:
    """Samples in a whole epoch; -1 where the iterable does not say."""
    sizes = (getattr(dataloader, name, None) for name in ("_orig_size", "_size"))
    return next((size for size in sizes if isinstance(size, int)), -1)


def has_read_all(dataloader: Any) -> bool:
    """Whether its own count says that nothing is left of the running epoch."""
    size, read = getattr(dataloader, "_size", -1), getattr(dataloader, "_counter", None)
    return isinstance(size, int) and isinstance(read, int) and 0 < size <= read
