"""Hot restart on torchrun: a rendezvous that owns a table of slots, spares that wait, and the store they share.

    rendezvous  what torchrun calls: `--rdzv-backend=stepwell`
    keeper      the thread that beats, looks and changes the table; `pulse`: who is alive, by this machine's clock
    table       slot -> node, and every way it may change, without I/O
    gate        what a node must pass before it may join
    serve       the store as a process of its own: `stepwell store`

For users: `docs/hot-restart.md`.
"""

from __future__ import annotations

from typing import Any


def backend() -> Any:
    """The entry point `torchrun.handlers`: every torchrun calls it, whichever backend it is started with."""
    from stepwell.launch.rendezvous import create

    return create
