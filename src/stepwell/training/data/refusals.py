"""Ways to read the data that a restart could not go on with, and what to do instead.

Not:     finding them (iteration, batches).
"""

from __future__ import annotations

from stepwell.errors import DataError


def second_pass(epoch: int) -> DataError:
    """The loop begins `ckpt.data` again in an epoch of `ckpt.epochs()` that is over."""
    return DataError(
        f"ckpt.data gives each batch of an epoch once, and epoch {epoch} of ckpt.epochs() is over: a second pass would "
        "be taken for the next epoch, and a restart would leave epochs out. Evaluate (or update_bn) over another "
        "loader, or over data= itself if that is a torch DataLoader; to train on the data again, ask ckpt.epochs() for "
        "more"
    )


def not_read() -> DataError:
    """`step()` ends a loop body, and nothing ever began to read `ckpt.data`."""
    return DataError(
        "ckpt.step() ends a loop body, data= was given, and no batch came from ckpt.data: it would not be known where "
        "in the data a restart goes on, and it would repeat batches. Iterate ckpt.data instead of the loader; or leave "
        "data= out, and skip the first ckpt.data.index batches of an epoch. A body that trains on something else says "
        "so: ckpt.step(batches=0)"
    )
