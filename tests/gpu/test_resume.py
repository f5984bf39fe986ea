"""On CUDA: killed and resumed ends with the same bits; checkpoints move between devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.events.journal import read_events
from tests.training.snapshot.cases import CASES
from tests.training.snapshot.truth import read_all, same_bytes, state_bytes

pytestmark = pytest.mark.gpu

SCRIPT = """
import os, signal, sys
import numpy, random, torch
import stepwell
torch.use_deterministic_algorithms(True)
torch.manual_seed(0); numpy.random.seed(0); random.seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.2),
    torch.nn.Linear(8 * 36, 10)).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data = torch.utils.data.TensorDataset(torch.randn(512, 1, 8, 8), torch.randint(0, 10, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
ckpt = stepwell.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, data=loader, seed=5,
                             policy=stepwell.Every(steps=5), snapshot=sys.argv[2])
ckpt.restore()
kill_at = int(sys.argv[3])
for epoch in ckpt.epochs(3):
    for x, y in ckpt.data:
        x, y = x.cuda(), y.cuda()
        loss = torch.nn.functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad(); ckpt.log(loss=loss)
        if ckpt.status().step == 2:
            ckpt.save().wait()  # memory for snapshots is ready from here on
        if ckpt.status().step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def train(where: Path, strategy: str, kill_at: int) -> int:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "STEPWELL_LINGER": "20"}
    command = [sys.executable, "-c", SCRIPT, str(where), strategy, str(kill_at)]
    return subprocess.run(command, env=environment, timeout=300, check=False).returncode


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["overlap", "device"])
def test_killed_run_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    assert train(tmp_path / "straight", strategy, -1) == 0
    for kill_at in (13, 44, 71):
        assert train(tmp_path / "killed", strategy, kill_at) == -signal.SIGKILL
    assert train(tmp_path / "killed", strategy, -1) == 0
    straight, killed = (read_all(tmp_path / name) for name in ("straight", "killed"))
    last = max(straight)
    assert last == max(killed) == 96
    assert [name for name, value in straight[last].items() if not same_bytes(value, killed[last][name])] == []
    restored = [event for event in read_events(tmp_path / "killed" / "events.jsonl") if event["kind"] == "restore"]
    assert [event["step"] > 0 for event in restored] == [True] * 3
    assert {event["source"] for event in restored} == {"memory"}


@pytest.mark.parametrize(("saved_on", "restored_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoint_moves_between_devices(saved_on: str, restored_on: str, run_dir: Path) -> None:
    case = CASES["adam"](saved_on)
    with stepwell.Checkpointer(run_dir, track=case.tracked, policy=stepwell.Never()) as ckpt:
        for number in range(3):
            case.body(ckpt, number)
            ckpt.step()
        ckpt.save().wait()
        saved = state_bytes(ckpt)
    other = CASES["adam"](restored_on)
    ckpt = stepwell.Checkpointer(run_dir, track=other.tracked, policy=stepwell.Never())
    assert ckpt.restore()
    for name, value in state_bytes(ckpt).items():
        if not name.startswith("stepwell/"):
            assert same_bytes(value, saved[name]), name
    assert next(other.tracked["model"].parameters()).device.type == restored_on
    assert {value["exp_avg"].device.type for value in other.tracked["optimizer"].state.values()} == {restored_on}
    other.body(ckpt, 0)
    ckpt.close()


def test_graph_replay_needs_updating(run_dir: Path) -> None:
    """A step replayed from a CUDA graph passes no hook: inside `updating()` the checkpoint is right."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 256, device="cuda")

    def iterate() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).pow(2).mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate()
    ckpt = stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, policy=stepwell.Never())
    expected = {}
    for step in range(1, 6):
        with ckpt.updating():
            graph.replay()
        ckpt.step()
        handle = ckpt.save()
        expected[step] = model.weight.detach().clone()
        handle.staging_completion.result(30)
    ckpt.close()
    found = read_all(run_dir)
    assert found and all(same_bytes(leaves["model/weight"], expected[step]) for step, leaves in found.items())
