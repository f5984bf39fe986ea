"""`stepwell store`: the rendezvous store of a job with spares, as a process of its own."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from stepwell.errors import ConfigError
from stepwell.tools.cli.output import json_option, print_json, say


@click.command()
@click.option("--bind", default="0.0.0.0", show_default=True, metavar="ADDRESS", help="Listen on this address only.")
@click.option("--port", type=click.IntRange(0, 65535), default=29400, show_default=True, help="0: any free port.")
@click.option(
    "--port-file", type=click.Path(path_type=Path), help="Write the port to this file once the store is running."
)
@json_option
def store(bind: str, port: int, port_file: Path | None, as_json: bool) -> None:
    """Serve the store through which the nodes of a job find each other (torchrun --rdzv-backend=stepwell).

    Run it where no training node's loss takes it along. It ends on SIGTERM. Whoever reaches its port can end or
    change the job: it has no authentication and no encryption, so let only the cluster's own network reach it.
    """
    try:
        from stepwell.launch.store_server import serve
    except ImportError as error:
        raise ConfigError(f"the store needs torch: install torch here ({error})") from error

    def tell(own_port: int) -> None:
        host = socket.getfqdn() if bind in ("0.0.0.0", "::") else bind
        if as_json:
            print_json({"host": host, "port": own_port})
        else:
            say(f"serving at {host}:{own_port}")
        say("no authentication, no encryption: allow access from the cluster's network only", is_aside=True)

    serve(bind, port, port_file, tell)
