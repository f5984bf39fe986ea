"""Where the agents of other nodes come in.

Owns:    the server for this node's cache of the run, at a socket that the trainer made: the next agent serves the same.
Not:     what is asked (keeper), who is let in (levels.serve).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.handover.protocol import Serve
from stepwell.storage.store.private_directory import make_private

if TYPE_CHECKING:
    from stepwell.levels.peers.server import PeerServer


class PeerDoor:
    """Constructing only assigns. `persister`: who answers questions, asked for each of them."""

    def __init__(self, persister: Callable[[], Persister]) -> None:
        self._persister = persister
        self._server: PeerServer | None = None
        self._seen: dict[str, int] = {}

    def open(self, message: Serve, fd: int) -> None:
        """Let others in from now on, in the place of those who were."""
        from stepwell.levels.peers.server import PeerServer
        from stepwell.levels.peers.tls import server_context

        self.close()
        root, run = Path(message.root), message.run
        make_private(root, advice="give Node() another directory")
        tls, sock = server_context(message.tls), socket.socket(fileno=fd)
        self._server = PeerServer(root, message.secret, run, self._answer, bind=sock, tls=tls)
        self._seen = {}
        self._server.start()

    def report(self, log: journal.EventLog) -> None:
        """Say what was refused since the last time."""
        refused = {} if self._server is None else self._server.refused
        fresh = {kind: count - self._seen.get(kind, 0) for kind, count in refused.items()}
        self._seen = refused
        if any(fresh.values()):
            from stepwell.events.level_events import Refused

            log.emit(Refused(kinds={kind: count for kind, count in fresh.items() if count}))

    def _answer(self, question: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A thread of the server."""
        from stepwell.agent.target.node_target import NodeTarget

        keeper = self._persister()
        return keeper.answer(question, fields) if isinstance(keeper, NodeTarget) else {}

    def close(self) -> None:
        """Hang up."""
        if self._server is not None:
            self._server.close()
            self._server = None
