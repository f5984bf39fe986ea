"""The same program of SCR's flow under MPI and Horovod: 4 ranks, one of which is killed and its node lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import wait_for
from tests.ranks.groups.launch import Launched

PROGRAM = Path(__file__).with_name("scr_program.py")
SECONDS = 90.0
pytestmark = pytest.mark.timeout(300)


class Program:
    """Its starts, one after the other."""

    def __init__(self, framework: str, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        (folder / "prefix").mkdir()
        self.starts: list[subprocess.Popen[bytes]] = []

    def start(self, nodes: str, *arguments: object, **env: str) -> None:
        number = len(self.starts)
        program = [sys.executable, str(PROGRAM), str(self.folder), f"--{self.framework}", *map(str, arguments)]
        shared = {"SCR_PREFIX": str(self.folder / "prefix"), "RANKS_LAUNCH": str(number), "OMP_NUM_THREADS": "1", **env}
        own = [{"SCR_CACHE_BASE": str(self.folder / f"node.{name}"), "STEPWELL_NODE": name} for name in nodes]
        if self.framework == "mpi":
            command = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
            for rank, one in enumerate(own):
                command += [":"] if rank else []
                command += [
                    "-np",
                    "1",
                    *(word for key, value in one.items() for word in ("-x", f"{key}={value}")),
                    *program,
                ]
        else:
            shared["SCR_PROGRAM_NODES"] = json.dumps(own)
            command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(len(nodes)), *program]
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, **shared}
            self.starts.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def results(self, size: int) -> dict[str, Any]:
        """What all ranks saw, which has to be the same."""
        places = [self.folder / f"result.{len(self.starts) - 1}.{rank}" for rank in range(size)]
        process = self.starts[-1]
        wait_for(
            lambda: process.poll() is not None or all(p.exists() for p in places), "all ranks are through", SECONDS
        )
        assert all(place.exists() for place in places), (self.folder / "log").read_text()[-5000:]
        found: list[dict[str, Any]] = [json.loads(place.read_text()) for place in places]
        assert all(other == found[0] for other in found), found
        return found[0]

    def kill(self, rank: int) -> None:
        """One rank; its launcher ends the others."""
        os.kill(int((self.folder / f"pid.{len(self.starts) - 1}.{rank}").read_text()), signal.SIGKILL)
        assert self.starts[-1].wait(SECONDS) != 0

    def end_well(self) -> None:
        assert self.starts[-1].wait(SECONDS) == 0, (self.folder / "log").read_text()[-5000:]

    def close(self) -> None:
        for process in self.starts:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


@pytest.fixture(params=["mpi", "horovod"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    if reason := Launched(request.param).why_not():
        pytest.skip(reason)
    made = Program(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("scheme", ["XOR", "PARTNER"])
def test_a_rank_is_killed_its_node_is_lost_and_its_files_are_rebuilt(program: Program, scheme: str) -> None:
    env = {"SCR_COPY_TYPE": scheme, "SCR_FLUSH": "10"}
    program.start("abcd", "--stay", "--steps", 3, **env)
    assert program.results(4) == {"seen": [], "made": [[1, True], [2, True], [3, True]]}
    program.kill(2)
    shutil.rmtree(program.folder / "node.c")
    program.start("abxd", "--steps", 5, **env)
    assert program.results(4) == {"seen": [[3, True]], "made": [[4, True], [5, True]]}
    program.end_well()
    for rank in range(4):
        assert (program.folder / "prefix" / "ckpt.5" / "data" / f"{rank}.bin").is_file(), "finalize carried the last"
