"""The store of a job as a process of its own, so that no training node's loss loses the job."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def serve(bind: str, port: int, port_file: Path | None, on_ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT. Port 0: any that is free. Raises OSError if it cannot be had."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the store's threads start, or they would take them
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind, port))
    listener.listen(1024)
    own_port = int(listener.getsockname()[1])
    store = TCPStore(
        bind,
        own_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    if port_file is not None:
        new = port_file.with_name(f"{port_file.name}.{os.urandom(8).hex()}.{os.getpid()}.tmp")
        new.write_text(f"{own_port}\n")
        new.rename(port_file)  # whoever waits for it never reads half a number
    on_ready(own_port)
    signal.sigwait(signals)
    del store
