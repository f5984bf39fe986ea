"""What a result has to say about where it comes from: machine and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def machine(device: str) -> dict[str, str]:
    import torch

    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    processor = names[0].split(":")[1].strip() if names else platform.machine()
    found = {"cores": str(os.cpu_count()), "processor": processor}
    found["memory"] = f"{int(memory) / 1e6:.0f} GB"
    found["kernel"], found["python"], found["torch"] = platform.release(), platform.python_version(), torch.__version__
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return found


def commit() -> str:
    if "STEPWELL_BENCH_COMMIT" in os.environ:  # a copy of the tree, whose own history is another one's
        return os.environ["STEPWELL_BENCH_COMMIT"]
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        return "unknown"
    status = subprocess.run([*command[:3], "status", "--porcelain"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() + (" (with changes)" if status.stdout.strip() else "")
