"""Serves the store through which ranks find each other, so that the death of any rank, 0 included, leaves it alone.

Run by the launcher, one for each launch: writes its port to the file it is given, then waits to be killed.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore


def main() -> None:
    store = TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(store.port))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
