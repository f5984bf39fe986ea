"""What a test bends in one rank: its clock, the disk of its agent, the speed of its copies. Read from the environment.

    RANKS_CLOCK_SHIFT=seconds   time.time() of trainer and agent is off by this much
    RANKS_STALL=path            the agent's next file operation waits while this file exists
    RANKS_FAIL_COPY=nth         the nth snapshot fails before the agent is told of it
    RANKS_SLOW_COPY=seconds     as STEPWELL_SLOW_COPY (which the fork server has read before this rank existed)

The agent runs isolated (`python -I -S -c ...`), so nothing in the environment reaches its interpreter. `install` puts a
small program in the place of `sys.executable`, which starts this file as a script; that bends what it is asked to and
then runs what the interpreter was given.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

STALLED = ".stalled"
"""Beside the file that stalls: an agent waits."""


def install(folder: Path) -> None:
    """In a trainer, before it makes its Checkpointer."""
    if "RANKS_SLOW_COPY" in os.environ:
        from stepwell import faults

        faults._slow_copy = float(os.environ["RANKS_SLOW_COPY"])
    if "RANKS_FAIL_COPY" in os.environ:
        fail_copy(int(os.environ["RANKS_FAIL_COPY"]))
    if not {"RANKS_CLOCK_SHIFT", "RANKS_STALL"} & os.environ.keys():
        return
    shift_clock()
    program = folder / f"python.{os.getpid()}"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__).resolve()}" "$@"\n')
    program.chmod(0o755)
    sys.executable = str(program)


def fail_copy(nth: int) -> None:
    from stepwell.training.snapshot import inflight

    inner, count = inflight.digests, itertools.count(1)

    def digests(*arguments: Any) -> Any:
        if next(count) == nth:
            raise RuntimeError("no memory for a digest")
        return inner(*arguments)

    inflight.digests = digests


def settle(ckpt: Any, number: int) -> None:
    """In the `number`-th step of a process: let the ranks agree who stores what, and have memory, before a step that a
    test counts on is saved. A busy machine would put such a save off.
    """
    together = getattr(ckpt, "_together", None)  # a stand-in has none
    if together is None or together.is_alone or number not in (2, 3):
        return
    deadline = time.monotonic() + 30
    while not (together._shared._cutters if number == 2 else ckpt._snapshotter.pool.is_ready):
        if time.monotonic() > deadline or together.is_broken:
            return
        time.sleep(0.002)


def shift_clock() -> None:
    shift, now = float(os.environ.get("RANKS_CLOCK_SHIFT", "0")), time.time
    time.time = lambda: now() + shift


def stall_files() -> None:
    """Before each file operation of the agent: wait while the file exists, and say so."""
    path = os.environ.get("RANKS_STALL")
    if path is None:
        return
    from stepwell import faults  # before anything that takes the function from there

    inner = faults.file_operation

    def wait_and_do(op: str, what: Any, length: int = 0) -> int:
        while os.path.exists(path):
            Path(f"{path}{STALLED}").touch()
            time.sleep(0.01)
        return inner(op, what, length)

    faults.file_operation = wait_and_do


def main() -> None:
    """As the interpreter would: `-I -S -c code argument ...`."""
    isolated, no_site, dash_c, code, *arguments = sys.argv[1:]
    assert [isolated, no_site, dash_c] == ["-I", "-S", "-c"], sys.argv
    sys.argv = ["-c", *arguments]
    shift_clock()
    sys.path[:0] = arguments[1:]
    stall_files()
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
