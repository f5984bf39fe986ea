"""Ways to read the data that a restart could not go on with, and what to do instead.

Not:     finding them (iteration, batches).
"""

from __future__ import annotations

from stepwell.errors import DataError


def second_pass(epoch: int) -> DataError:
    """The loop begins `ckpt.data` again in an epoch of `ckpt.epochs()` that is over."""
    return DataError(
        f"ckpt.data yields each batch of an epoch once, and epoch {epoch} of ckpt.epochs() is over: a "
        "second pass would count as the next epoch, and a restart would skip epochs. To evaluate (or "
        "for update_bn), use another loader, or data= itself if that is a torch DataLoader; to train "
        "on the data again, ask ckpt.epochs() for more"
    )


def not_read() -> DataError:
    """`step()` ends a loop body, and nothing ever began to read `ckpt.data`."""
    return DataError(
        "ckpt.step() ends a loop body, but no batch came from ckpt.data although data= was given: a "
        "restart would not know its position in the data, and would repeat batches. Iterate "
        "ckpt.data instead of the loader; or drop data=, and skip the first ckpt.data.index batches "
        "of an epoch. If a body trains on something else, call ckpt.step(batches=0)"
    )
