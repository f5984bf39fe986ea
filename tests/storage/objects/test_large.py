"""A gigabyte in a bucket: killed in the middle of the upload, over a slow line, with a server that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepwell.storage.store import catalog, files
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import report, wait_for
from tests.storage.objects.conftest import MakeProxy
from tests.storage.objects.server import Server as Bucket
from tests.storage.objects.test_run import Errors
from tests.tools.cli.commands import good

SCRIPT = """
import os, sys, time
import torch
import stepwell

torch.manual_seed(0)
torch.set_num_threads(1)
sizes = [int(sys.argv[2]) // 4 // 4] * 4
model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in sizes])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = stepwell.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, policy=stepwell.Never(), keep=2, grace=None)
ckpt.restore()
first = ckpt.status().step
for step in range(first + 1, int(sys.argv[3]) + 1):
    for parameter in model:
        parameter.grad = torch.full_like(parameter, float(step))
    optimizer.step()
    ckpt.step()
    handle = ckpt.save()
    print("saved", step, flush=True)
    handle.upload_completion.result()
    print("durable", step, flush=True)
ckpt.close()
import hashlib
print("digest", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model)).hexdigest(), flush=True)
"""


class Large:
    """One run of the script after the other, over one address."""

    def __init__(self, address: ObjectPath, nbytes: int, folder: Path, env: dict[str, str]) -> None:
        self.address, self._nbytes, self._folder = address, nbytes, folder
        self._env = {**os.environ, **env, "STEPWELL_DESK": str(folder / "desk"), "STEPWELL_LINGER": "0.1"}
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)

    def start(self, steps: int, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self._script), str(self.address), str(self._nbytes), str(steps)]
        return subprocess.Popen(command, env={**self._env, **env}, stdout=subprocess.PIPE, text=True)

    def finish(self, steps: int, **env: str) -> str:
        """Run to the end. The digest of all parameters."""
        process = self.start(steps, **env)
        out, _ = process.communicate(timeout=900)
        assert process.returncode == 0, out
        return out.split()[-1]


def check_visible(address: ObjectPath, steps: list[int]) -> None:
    """These are committed and whole; nothing else counts as a checkpoint."""
    entries = [entry for entry in catalog.scan(RunPaths(address)) if entry.is_committed]
    assert [entry.id.step for entry in entries] == steps and all(entry.is_good for entry in entries)
    good("verify", address)


@pytest.mark.soak
@pytest.mark.parametrize("nbytes", [64 << 20, 1 << 30])
@pytest.mark.timeout(1800)
def test_a_large_state(nbytes: int, address: ObjectPath, bucket: Bucket, make_proxy: MakeProxy, tmp_path: Path) -> None:
    proxy = make_proxy()
    large = Large(address, nbytes, tmp_path, bucket.environment(proxy.port))
    large.finish(1)
    check_visible(address, [1])

    # Trainer and agent die when half of the second one is sent. A slow line makes that a long time.
    proxy.rate = nbytes / 20
    mark = tmp_path / "mark"
    crash = {"STEPWELL_CRASH": "agent!shard.middle:0:1", "STEPWELL_CRASH_MARK": str(mark)}
    process = large.start(2, **crash)
    wait_for(mark.exists, "half of it is sent", 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "rank-00000.safetensors" not in files.list_names(address / "step-000000000002.l0002")
    check_visible(address, [1])

    # Errors, lost answers and broken connections all the way; then an undisturbed one reads it.
    proxy.rate, proxy.rule = nbytes / 4, Errors(4)
    started = time.monotonic()
    digest = large.finish(3)
    seconds = time.monotonic() - started
    proxy.rate, proxy.rule = 0.0, lambda method, path: None
    assert len([what for _, _, what in proxy.seen if what != "passed"]) > 8
    check_visible(address, [3, 2])
    assert large.finish(3) == digest
    calm: dict[str, Any] = bucket.environment()
    there = Large(ObjectPath(address.bucket, f"{address.key}-calm"), nbytes, tmp_path, calm)
    assert there.finish(3) == digest, "the same bits as a run that nothing happened to"
    report(f"bucket, {nbytes >> 20} MiB: killed in mid-upload, slowed down, every 4th request failed: {seconds:.0f} s")
