"""How long an agent takes to start, and how much memory is its own. No torch, no training: the agent alone.

    python benchmarks/agent_start.py [starts]

Prints the median and the slowest start (from fork to its first answer) beside the limits of the design: under
0.15 s and under 45 MB.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from stepwell.events.journal import EventLog
from stepwell.handover.client import AgentClient
from stepwell.handover.protocol import Hello
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep

LIMIT_SECONDS, LIMIT_BYTES = 0.15, 45_000_000


def own_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return table["Private_Clean"] + table["Private_Dirty"]


def start_one(root: Path) -> tuple[float, int]:
    """Seconds until an agent answered, and its own bytes then."""
    paths = RunPaths(root)
    run, lineage = open_run(paths, seed=1), create_next(paths, parent=0, step=0)
    log = EventLog(paths.events, who="trainer")
    client = AgentClient(log)
    hello = Hello(
        os.getpid(), run.id, str(root), lineage.number,
        rank=0, world_size=1, agents="", keep=Keep(), linger=0, patience=600.0,
    )  # fmt: skip
    started = time.monotonic()
    client.start(hello)
    seconds = time.monotonic() - started
    found = own_bytes(client.pid)
    client.close(seconds=10)
    log.close()
    return seconds, found


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        measured = [start_one(Path(folder) / str(number)) for number in range(starts)]
    seconds, sizes = sorted(second for second, _ in measured), [size for _, size in measured]
    print(f"{starts} starts on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"start-up   median {statistics.median(seconds):.3f} s, slowest {seconds[-1]:.3f} s   (limit {LIMIT_SECONDS} s)"
    )
    print(f"own memory largest {max(sizes) / 1e6:.1f} MB                     (limit {LIMIT_BYTES / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()
