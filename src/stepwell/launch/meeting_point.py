"""Where the workers of a round meet: an address of this node, and a port that nobody else gets."""

from __future__ import annotations

import contextlib
import socket


def own_address(store_host: str, store_port: int) -> str:
    """The address by which this node reaches the store's network; the host name where that cannot be told."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.getfqdn()


def hold_port() -> socket.socket:
    """Bind a free port without listening on it: the system gives it to nobody else, and a server may still take it.

    Both have to say SO_REUSEADDR, which the store of torch does. Looking for a free port and hoping, as torchrun does,
    loses it now and then to an outgoing connection in the seconds until the worker has loaded torch.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        with contextlib.suppress(OSError):
            held = socket.socket(family, socket.SOCK_STREAM)
            try:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("", 0))
                return held
            except OSError:
                held.close()
                raise
    raise OSError("there is no free port on this machine")
