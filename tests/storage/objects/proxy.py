"""Stands between a client and the S3 server, and treats it badly: errors, lost answers, slow lines, long waits."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Rule = Callable[[str, str], str | None]
"""Told method and path of a request. None: pass it on; `500`, `503`: answer that instead; `lose`: pass it on and break
the connection in the place of the answer; `refuse`: break it at once.
"""
_PIECE = 1 << 18


class Proxy:
    """Listens on a port of loopback. `rate`: bytes a second that each connection carries, 0 for no limit."""

    def __init__(self, upstream: int, rule: Rule = lambda method, path: None) -> None:
        self.rule = rule
        self.rate = 0.0
        self.seen: list[tuple[str, str, str]] = []
        """Method, path and what was done with it."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_GET(self) -> None:
                proxy._handle(self, upstream)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def count(self, method: str, what: str | None = None) -> int:
        """Requests with this method, of those with this outcome."""
        return sum(found[0] == method and what in (None, found[2]) for found in list(self.seen))

    def _handle(self, handler: BaseHTTPRequestHandler, upstream: int) -> None:
        method, path = handler.command, handler.path
        action = self.rule(method, path)
        self.seen.append((method, path, action or "passed"))
        if action == "refuse":
            handler.close_connection = True
            return
        body = self._read(handler)
        if action in ("500", "503"):
            text = b"<Error><Code>SlowDown</Code></Error>"
            handler.send_response(int(action))
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            if method != "HEAD":
                handler.wfile.write(text)
            return
        connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
        except OSError:
            handler.close_connection = True  # the server is gone: so are we
            return
        finally:
            connection.close()
        if action == "lose":
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        length = answer.getheader("Content-Length")
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", (length or "0") if method == "HEAD" else str(len(data)))
        handler.end_headers()
        for start in range(0, len(data), _PIECE):
            handler.wfile.write(data[start : start + _PIECE])
            self._slow(len(data[start : start + _PIECE]))

    def _read(self, handler: BaseHTTPRequestHandler) -> bytes:
        length, pieces = int(handler.headers.get("Content-Length") or 0), []
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.send_response_only(100)
            handler.end_headers()
        while length:
            piece = handler.rfile.read(min(length, _PIECE))
            if not piece:
                raise ConnectionResetError
            pieces.append(piece)
            length -= len(piece)
            self._slow(len(piece))
        return b"".join(pieces)

    def _slow(self, nbytes: int) -> None:
        if self.rate:
            time.sleep(nbytes / self.rate)
