"""TLS between nodes, from three files that an administrator puts on each of them.

    cert.pem, key.pem    of this node, signed by the authority, for the name `stepwell`
    ca.pem               the authority

Holds:   without a folder nothing is encrypted; with one, who has no certificate of that authority is refused, on
         either side.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError

NAME: Final = "stepwell"
"""What every certificate has to be for: nodes are told apart by the run's secret, not by their names."""


def server_context(folder: str | None) -> ssl.SSLContext | None:
    """For the side that is called. Raises ConfigError."""
    return _context(folder, ssl.PROTOCOL_TLS_SERVER)


def client_context(folder: str | None) -> ssl.SSLContext | None:
    """For the side that calls. Raises ConfigError."""
    return _context(folder, ssl.PROTOCOL_TLS_CLIENT)


def _context(folder: str | None, side: int) -> ssl.SSLContext | None:
    if folder is None:
        return None
    place = Path(folder)
    context = ssl.SSLContext(side)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(place / "cert.pem", place / "key.pem")
        context.load_verify_locations(place / "ca.pem")
    except OSError as error:
        raise ConfigError(
            f"Node(tls={folder!r}): {error}; the folder has to hold cert.pem, key.pem and ca.pem", path=folder
        ) from error
    return context
