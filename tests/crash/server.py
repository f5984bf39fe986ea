"""Imports torch and stepwell once and forks trainers: starting one costs milliseconds instead of four seconds.

This process never runs a second thread (it checks before every fork), so a child is what a fresh interpreter would be
after its imports; its agent is started by exec as always. It ends as an interpreter does, threads joined and exit
handlers run, but does not take its modules apart, which would copy every page of them. Requests are lines of JSON
on stdin: `{"start": [argv], "env": {...}, "log": path, "namespace": pid}` answers the pid, `{"reap": pid}` waits and
answers the status, `{"end": true}` ends it. A trainer enters the mount namespace of the process `namespace`, if that
is not 0; with `"host": pid` instead it runs on that host of `tests/hosts`, in all of its namespaces.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # scripts import what tests share


def warm_up() -> None:
    """Import what the first optimizer and the first step import lazily."""
    import numpy
    import torch
    import torch.utils.data

    torch.set_num_threads(1)
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    numpy.random.rand()
    for name in ("stepwell.checkpointer", *sys.argv[2:]):
        importlib.import_module(name)


def enter(pid: int | str, *spaces: str) -> None:
    """Go into namespaces of a process; `pid`: that of children to come."""
    handles = [os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY | os.O_CLOEXEC) for space in spaces]
    for space, handle in zip(spaces, handles, strict=True):
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
            raise OSError(ctypes.get_errno(), f"setns {space}")
        os.close(handle)


def fork(request: dict[str, Any]) -> int:
    """A child on the host that is asked for, which is its parent's own if there is none."""
    host = request.get("host", 0)
    if not host:
        return os.fork()
    enter(host, "pid")
    pid = os.fork()
    if pid:
        enter("self", "pid")
    else:
        enter(host, "time", "net", "uts", "mnt")
    return pid


def become_trainer(request: dict[str, Any]) -> None:
    """In the child: from here on this is an ordinary run of the script. Does not return."""
    if request["namespace"]:
        enter(request["namespace"], "mnt")
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])
    sys.modules["stepwell.faults"].set_role("trainer")  # reads the environment again, as a fresh process would
    sys.argv = list(request["start"])
    status: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        status = ending.code
    except BaseException as error:
        traceback.print_exc()
        sys.last_type = type(error)  # as the interpreter does before its exit handlers run
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:  # as the interpreter ends after Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or 0)


def main() -> None:
    warm_up()
    gc.freeze()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "end" in request:
            return
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            threads = len(os.listdir("/proc/self/task"))
            assert threads == 1, f"{threads} threads: a forked child would not be like a fresh process"
            pid = fork(request)
            if pid == 0:
                become_trainer(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
