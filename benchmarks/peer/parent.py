"""A child's line to the parent: one socket, one JSON object a line."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

VARIABLE = "STEPWELL_BENCH_FD"


class Parent:
    """Says things to the process that measures us. Where there is none, nothing happens."""

    def __init__(self) -> None:
        text = os.environ.pop(VARIABLE, "")  # not for our own children
        self._socket = socket.socket(fileno=int(text)) if text else None
        self._lines = self._socket.makefile("r") if self._socket else None

    def say(self, what: str, **facts: Any) -> None:
        if self._socket is not None:
            self._socket.sendall((json.dumps({"say": what, **facts}) + "\n").encode())

    def ask(self, what: str, **facts: Any) -> str:
        """Say it and wait for the answer."""
        self.say(what, **facts)
        return self._lines.readline().strip() if self._lines else ""
