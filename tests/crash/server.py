"""Imports torch once and forks trainers: starting one costs milliseconds instead of four seconds.

This process never runs a second thread (it checks before every fork), so a child is what a fresh interpreter would be
after `import torch`; it imports stepwell itself, and its agent is started by exec as always. Requests are lines of JSON
on stdin: `{"start": [argv], "env": {...}, "log": path, "namespace": pid}` answers the pid, `{"reap": pid}` waits and
answers the status. A trainer enters the mount namespace of the process `namespace`, if that is not 0.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import sys


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


def become_trainer(request: dict[str, object]) -> None:
    """In the child: from here on this is an ordinary run of the script."""
    if request["namespace"]:
        handle = os.open(f"/proc/{request['namespace']}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
            raise OSError(ctypes.get_errno(), "setns")
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])  # type: ignore[call-overload]
    sys.argv = list(request["start"])  # type: ignore[call-overload]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    warm_up()
    assert "stepwell" not in sys.modules
    gc.freeze()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            threads = len(os.listdir("/proc/self/task"))
            assert threads == 1, f"{threads} threads: a forked child would not be like a fresh process"
            pid = os.fork()
            if pid == 0:
                become_trainer(request)
                return  # through the interpreter's own end: atexit handlers run as in any script
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
