"""Real processes for the tests of groups, one way of starting them for each backend."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[3]
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_RESULT_SECONDS = 60.0
_COMMANDS = {
    # Recovery: otherwise it ends all ranks when one dies.
    "mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--enable-recovery", "-np"],
    "horovod": [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np"],
}


class Backend(Protocol):
    """Starts the ranks of one test at a time."""

    kind: str
    can_lose_ranks: bool
    names_missing: bool

    def start(self, scene: str, size: int, folder: Path) -> None: ...

    def signal(self, pid: int, number: int) -> None: ...

    def end(self) -> None: ...


class Nursery:
    """The process of nursery.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.groups.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
        )

    def ask(self, **request: object) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with self._process as process:
            assert process.stdin
            process.stdin.close()


class Torch:
    """torch.distributed, over one kind of store."""

    kind = "DistributedGroup"
    can_lose_ranks = True
    names_missing = True

    def __init__(self, nursery: Nursery, store: str) -> None:
        self._nursery = nursery
        self._store = store
        self._pids: list[int] = []

    def start(self, scene: str, size: int, folder: Path) -> None:
        self._pids = self._nursery.ask(do="start", store=self._store, scene=scene, size=size, folder=str(folder))

    def signal(self, pid: int, number: int) -> None:
        self._nursery.ask(do="signal", pid=pid, number=number)

    def end(self) -> None:
        self._nursery.ask(do="end", pids=self._pids)


class Launched:
    """MPI or Horovod, whose launcher starts the ranks."""

    def __init__(self, framework: str) -> None:
        self.kind = {"mpi": "MpiGroup", "horovod": "HorovodGroup"}[framework]
        self.can_lose_ranks = self.names_missing = framework == "mpi"
        self._framework = framework
        self._launcher: subprocess.Popen[bytes] | None = None

    def why_not(self) -> str | None:
        """What is not installed."""
        module = {"mpi": "mpi4py", "horovod": "horovod"}[self._framework]
        if importlib.util.find_spec(module) is None or shutil.which(_COMMANDS[self._framework][0]) is None:
            return f"{self._framework} is not installed: `make test-{self._framework}`"
        return None

    def start(self, scene: str, size: int, folder: Path) -> None:
        rank = [sys.executable, "-m", "tests.ranks.groups.rank", self._framework, scene, str(folder)]
        self._launcher = subprocess.Popen(
            [*_COMMANDS[self._framework], str(size), *rank],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
        )

    def signal(self, pid: int, number: int) -> None:
        os.kill(pid, number)  # of a rank that waits for this, so it is still that process

    def end(self) -> None:
        if self._launcher is not None:
            self._launcher.terminate()  # it ends the ranks
            self._launcher.wait(30)


class Stage:
    """A scene that is being played."""

    def __init__(self, backend: Backend, folder: Path, size: int) -> None:
        self.backend = backend
        self.folder = folder
        self.size = size

    def results(self, *without: int) -> dict[int, dict[str, Any]]:
        """What the ranks left, once they have. Fails with the traceback of one that failed."""
        ranks = [rank for rank in range(self.size) if rank not in without]
        deadline = time.monotonic() + _RESULT_SECONDS
        while not all((self.folder / f"result-{rank}").exists() for rank in ranks):
            assert not (self.folder / "result--1").exists(), (self.folder / "result--1").read_text()
            assert time.monotonic() < deadline, sorted(path.name for path in self.folder.iterdir())
            time.sleep(0.01)
        found = {rank: json.loads((self.folder / f"result-{rank}").read_text()) for rank in ranks}
        for rank, result in found.items():
            assert "failure" not in result, f"rank {rank}:\n{result['failure']}"
            assert result["kind"] == self.backend.kind
        return found

    def wake(self, rank: int) -> None:
        """Let a stopped rank go on."""
        self.backend.signal(int((self.folder / f"pid-{rank}").read_text()), signal.SIGCONT)
