"""Hot restart on torchrun: a rendezvous with spare nodes. For users: `docs/hot-restart.md`.

rendezvous      what torchrun calls with `--rdzv-backend=stepwell`
slot_table      slot -> node, and every change of it
round           what torchrun takes for the store of a round
store_thread    beats, looks at the others, changes the table
store_server    the store as a process of its own: `stepwell store`
pulse           who is alive
health          what a node must pass before it joins
conf            `--rdzv-conf`
workers         the workers that torchrun started
exit_status     how torchrun's agent ends
meeting_point   the address and port of a round
"""

from __future__ import annotations

from typing import Any


def backend() -> Any:
    """The entry point `torchrun.handlers`: every torchrun calls it, whichever backend it is started with."""
    from stepwell.launch.rendezvous import create

    return create
