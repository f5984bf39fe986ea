"""A tiny model for very many steps. Prints what the process and its agent hold, as JSON lines.

python tiny_trainer.py DIRECTORY POLICY STEPS
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

import stepwell
from stepwell.events.event_file import parts_of

POLICIES = {
    "steps": {"policy": stepwell.Every(steps=500)},
    "seconds": {"policy": stepwell.Every(seconds=0.5)},
    "auto": {"policy": stepwell.Auto(overhead=0.03)},
    "memory": {"policy": stepwell.Every(steps=5_000), "memory": stepwell.Every(steps=1)},
}
LOOKS = 5


def own_bytes(pid: int) -> int:
    """Memory that no other process shares; what lies in arenas is shared."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return table["Private_Clean"] + table["Private_Dirty"]


def look(where: Path, step: int, agent: int, started: float) -> None:
    gc.collect()
    files = [name for _, _, names in os.walk(where) for name in names]
    print(
        json.dumps(
            {
                "step": step,
                "seconds": round(time.monotonic() - started, 1),
                "trainer": own_bytes(os.getpid()),
                "agent": own_bytes(agent),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "agent_descriptors": len(os.listdir(f"/proc/{agent}/fd")),
                "files": len(files),
                "event_bytes": sum(part.stat().st_size for part in parts_of(where / "events.jsonl") if part.exists()),
            }
        ),
        flush=True,
    )


def main(where: Path, policy: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    model = torch.nn.ParameterDict({"weight": weight})
    weight.grad = torch.ones(4)
    with stepwell.Checkpointer(where, model=model, optimizer=optimizer, **POLICIES[policy]) as ckpt:
        ckpt.restore()
        started = time.monotonic()
        for step in range(1, steps + 1):
            optimizer.step()
            ckpt.log(loss=1.0)
            ckpt.step()
            if step % (steps // LOOKS) == 0:
                look(where, step, ckpt.status().agent_pid, started)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
