"""Every shard opens with stock safetensors, which finds in it the same bytes, aligned, from a page boundary on."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

import stepwell
from stepwell.storage.format import dtypes
from stepwell.storage.format.record import Record
from stepwell.storage.format.shard import PAGE
from tests.restore.build import RunBuilder
from tests.training.state import zoo
from tests.training.state.same import tensor_bytes


def test_every_committed_shard_opens_with_stock_safetensors(tmp_path: Path) -> None:
    """All element types, the frozen file included: the stock library finds the same bytes, aligned, from a page on."""
    build = RunBuilder(tmp_path / "run")
    state = {"dtypes": zoo.every_dtype(), "tensors": zoo.tensors(), "more": {"odd / % \u00fc": torch.ones(3)}}
    names = {f"dtypes/{name}" for name in list(zoo.every_dtype())[::2]}
    id = build.write(state, 5, frozen=names)
    directory = build.paths.checkpoint(id)
    record = Record.load((directory / "rank-00000.json").read_bytes(), path="x")
    expected = {f"dtypes/{name}": tensor for name, tensor in zoo.every_dtype().items()}
    expected |= {f"tensors/{name}".replace("%", "%25"): tensor for name, tensor in zoo.tensors().items()}
    assert [file.name for file in record.files] == ["rank-00000.safetensors", "rank-00000.frozen.safetensors"]
    seen = 0
    for number, file in enumerate(record.files):
        data = (directory / file.name).read_bytes()
        assert len(data) == file.nbytes
        with safe_open(directory / file.name, framework="pt") as opened:
            leaves = [leaf for leaf in record.leaves if leaf.file == number]
            assert sorted(opened.keys()) == sorted(leaf.name for leaf in leaves)
            assert min(leaf.start for leaf in leaves) % PAGE == 0
            for leaf in leaves:
                assert leaf.start % dtypes.itemsize(leaf.dtype) == 0
                found = opened.get_tensor(leaf.name)
                assert tensor_bytes(found) == data[leaf.start : leaf.end]
                if leaf.dtype in dtypes.NATIVE:
                    assert str(found.dtype) == f"torch.{leaf.dtype}" and tuple(found.shape) == leaf.shape
                if leaf.name in expected:
                    assert tensor_bytes(found) == tensor_bytes(expected[leaf.name])
                    seen += 1
    assert seen == len(expected)


def test_the_shards_of_a_real_run_open_too(run_dir: Path) -> None:
    """Written by the agent: a tied weight once, frozen parameters in a file of their own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    ckpt = stepwell.Checkpointer(run_dir, policy=stepwell.Never(), model=model, optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        ckpt.step()
    directory = run_dir / ckpt.save().wait(60)
    ckpt.close()
    with safe_open(directory / "rank-00000.safetensors", framework="pt") as live:
        names = set(live.keys())
        assert torch.equal(live.get_tensor("model/0.weight"), model[0].weight)
        moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
        assert torch.equal(live.get_tensor("optimizer/state/0/exp_avg_sq"), moment)
        assert live.metadata() == {"format": "pt", "writer": "stepwell"}
    assert "model/2.weight" not in names and "model/1.weight" not in names
    with safe_open(directory / "rank-00000.frozen.safetensors", framework="pt") as frozen:
        assert set(frozen.keys()) == {"model/1.weight", "model/1.bias"}
        assert torch.equal(frozen.get_tensor("model/1.weight"), model[1].weight)
