"""Every element type and shape on a CUDA device: saved by the device copier, back on the device with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.events.journal import read_events
from tests.training.state import zoo
from tests.training.state.same import difference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]

RESTORE = """
import sys, torch
import stepwell
print("cuda:", torch.cuda.is_available())
found = {}
with stepwell.Checkpointer(sys.argv[1], policy=stepwell.Never(), values=found) as ckpt:
    assert ckpt.restore()
print("w:", found["w"].device, found["w"].tolist())
"""


def on_device(value: Any) -> Any:
    """Bytes first: not every element type can be copied as itself."""
    if value.element_size() == 1 and value.numel():
        return value.view(torch.uint8).cuda().view(value.dtype)
    return value.cuda()


def state() -> dict[str, Any]:
    tensors = {name: tensor.detach() for name, tensor in zoo.tensors().items()}
    weight = torch.arange(5.0, device="cuda")
    return {
        "dtypes": {name: on_device(tensor) for name, tensor in zoo.every_dtype().items()},
        "tensors": {name: on_device(tensor) for name, tensor in tensors.items()},
        "strided": torch.arange(24.0, device="cuda").reshape(4, 6).t()[::2],
        "expanded": torch.tensor([1.5], device="cuda").expand(4),
        "tied": [weight, weight],
    }


def host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cuda"
        if value.element_size() == 1 and value.numel():
            return value.view(torch.uint8).cpu().view(value.dtype)
        return value.cpu()
    if isinstance(value, dict):
        return {key: host(item) for key, item in value.items()}
    return [host(item) for item in value]


@pytest.mark.parametrize("snapshot", ["auto", "device", "overlap", "blocking"])
def test_every_tensor_comes_back_to_the_device(run_dir: Path, snapshot: str) -> None:
    with stepwell.Checkpointer(run_dir, policy=stepwell.Never(), snapshot=snapshot, values=state()) as ckpt:
        ckpt.step()
        ckpt.save().wait(60)
    found: dict[str, Any] = {}
    with stepwell.Checkpointer(run_dir, policy=stepwell.Never(), values=found) as ckpt:
        assert ckpt.restore()
    assert difference(host(found), host(state())) is None
    assert found["tied"][0] is found["tied"][1]


def test_what_was_saved_on_the_device_restores_where_there_is_none(run_dir: Path) -> None:
    with stepwell.Checkpointer(
        run_dir, policy=stepwell.Never(), values={"w": torch.arange(3.0, device="cuda")}
    ) as ckpt:
        ckpt.step()
        ckpt.save().wait(60)
    command = [sys.executable, "-c", RESTORE, str(run_dir)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # this process has CUDA for good
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["cuda: False", "w: cpu [0.0, 1.0, 2.0]"]
    told = [event["problems"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "mismatch"]
    assert told == [[f"CUDA generators: saved {torch.cuda.device_count()}, here are 0"]]
