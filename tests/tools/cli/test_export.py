"""`export`: files that the stock libraries open, with the bytes of the checkpoint, or no file at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stepwell.restore.byte_sources import FileSource
from stepwell.restore.verified_read import read_record_leaves
from stepwell.storage.format.dtypes import NATIVE
from stepwell.storage.store import catalog
from stepwell.storage.store.lineage import read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.training.state.flatten import dtype_from
from stepwell.types import CheckpointId
from tests.tools.cli.commands import flip, good, listing, stepwell
from tests.tools.cli.trainer import Net

DIRECTORY = "step-000000000008.l0002"
GOLDEN = Path(__file__).parents[2] / "golden" / "v1"


def leaves(run: Path, directory: str = DIRECTORY) -> dict[str, torch.Tensor]:
    """What the checkpoint holds, read by the way that restore reads it."""
    paths, id = RunPaths(run), CheckpointId.parse(directory)
    assert id is not None
    manifest = catalog.judge(paths, id, read_history(paths)).manifest
    assert manifest is not None
    record = catalog.read_record(paths, manifest)
    buffers = {leaf.name: bytearray(leaf.end - leaf.start) for leaf in record.leaves}

    def deliver(leaf: Any, offset: int, data: memoryview) -> None:
        buffers[leaf.name][offset : offset + len(data)] = data

    read_record_leaves(record, lambda file: FileSource(run / directory / file.name), None, deliver)
    found = {}
    for leaf in record.leaves:
        data, dtype = buffers[leaf.name], dtype_from(leaf.dtype)
        found[leaf.name] = torch.frombuffer(data, dtype=dtype).view(leaf.shape) if data else torch.empty(leaf.shape)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def test_a_model_for_stock_safetensors(made_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    answer = good("export", made_run, out, "--only", "model")
    assert answer.out.startswith(f"wrote {out}: ")
    expected = {name.removeprefix("model/"): t for name, t in leaves(made_run).items() if name.startswith("model/")}
    found = safetensors.torch.load_file(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if str(tensor.dtype).removeprefix("torch.") in NATIVE:
            assert same(found[name], tensor), name
    assert bytes(found["turns"].numpy()) == bytes(expected["turns"].numpy())  # complex64, as bytes
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_loads_with_the_stock_loader_and_is_tied_again(made_run: Path, tmp_path: Path) -> None:
    """complex64 is not a type of this format, so the stock loader gets a model without that buffer."""
    out = tmp_path / "model.safetensors"
    good("export", made_run, out, "--only", "model")
    model = Net()
    del model.turns
    missing, unexpected = safetensors.torch.load_model(model, out, strict=False)
    assert (set(missing), list(unexpected)) == (set(), ["turns"])
    expected = leaves(made_run)
    assert model.decoder.weight is model.encoder.weight
    assert same(model.decoder.weight.detach(), expected["model/encoder.weight"])
    assert same(model.norm.running_mean, expected["model/norm.running_mean"])


def test_what_safetensors_cannot_hold_is_told(made_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.safetensors"
    document = good("export", made_run, out, "--json").json
    assert set(document) == {"checkpoint", "step", "out", "format", "only", "nbytes", "tensors", "notes"}
    assert document["nbytes"] == out.stat().st_size
    tied, odd, values = document["notes"]
    assert "model/decoder.weight = model/encoder.weight" in tied
    assert "safetensors has no complex64" in odd
    assert "plain values are left out" in values and "--format torch includes them" in values
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert metadata["model/decoder.weight"] == "model/encoder.weight"
    about = json.loads(metadata["stepwell"])
    assert (about["step"], about["lineage"]) == (8, 2)
    assert about["stored_as_bytes"] == {"model/turns": {"dtype": "complex64", "shape": [2]}}


def test_a_whole_checkpoint_for_stock_safetensors(made_run: Path, tmp_path: Path) -> None:
    good("export", made_run, tmp_path / "all", "--step", 6)
    found, expected = safetensors.torch.load_file(tmp_path / "all"), leaves(made_run, "step-000000000006.l0002")
    assert len(found) == len(expected)
    assert same(found["optimizer/state/0/exp_avg"], expected["optimizer/state/0/exp_avg"])
    assert same(found["notes/(1, 2)"], expected["notes/(1, 2)"])


def test_for_torch_load(made_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    answer = good("export", made_run, out, "--format", "torch")
    assert "notes/phase: enum -> str" in " ".join(answer.out.split())
    state, expected = torch.load(out, weights_only=True), leaves(made_run)
    assert list(state) == ["model", "optimizer", "notes", "stepwell"]
    for name, tensor in state["model"].items():
        leaf = "model/encoder.weight" if name == "decoder.weight" else f"model/{name}"
        assert same(tensor, expected[leaf]), name
    assert state["model"]["decoder.weight"].data_ptr() == state["model"]["encoder.weight"].data_ptr()
    assert same(state["optimizer"]["state"][0]["exp_avg"], expected["optimizer/state/0/exp_avg"])
    assert state["stepwell"]["step"] == 8
    notes = state["notes"]
    assert notes["phase"] == "Phase.WARM_UP"
    assert notes["seen"] == {1, 2}
    assert notes["recent"] == [1.5, 2.5]
    assert same(notes["array"], torch.arange(6).reshape(2, 3))
    assert notes["dates"].dtype == torch.uint8
    assert (notes["number"], type(notes["number"])) == (0.5, float)
    assert notes["tuple"] == (1, None, True, "text")
    assert notes["limits"] == [float("inf"), 2**70, 1 + 2j, b"bytes"]
    assert notes[3] == "an int key"
    assert same(notes[(1, 2)], torch.ones(2, dtype=torch.float16))


def test_a_model_and_an_optimizer_go_back_into_live_objects(made_run: Path, tmp_path: Path) -> None:
    for name in ("model", "optimizer"):
        good("export", made_run, tmp_path / name, "--only", name, "--format", "torch")
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "model", weights_only=True))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer", weights_only=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert same(model.turns, leaves(made_run)["model/turns"])


def test_nothing_of_that_name(made_run: Path, tmp_path: Path) -> None:
    answer = stepwell("export", made_run, tmp_path / "x", "--only", "ema")
    assert answer.code == 2
    assert "has no 'ema'; it has model, optimizer, notes, stepwell" in answer.err


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_file_is_replaced_only_if_asked_for(form: str, made_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    answer = stepwell("export", made_run, out, "--format", form)
    assert answer.code == 2
    assert "use --force to replace it" in answer.err
    assert out.read_text() == "precious"
    good("export", made_run, out, "--format", form, "--force")
    assert out.stat().st_size > 1000
    assert stepwell("export", made_run, tmp_path, "--format", form).code == 2
    assert stepwell("export", made_run, tmp_path / "no" / "out", "--format", form).code == 2
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_wrong_byte_stops_it_and_leaves_no_file(form: str, run: Path, tmp_path: Path) -> None:
    shard = run / DIRECTORY / "rank-00000.safetensors"
    flip(shard, shard.stat().st_size - 3)
    out = tmp_path / "out" / "x"
    out.parent.mkdir()
    answer = stepwell("export", run, out, "--format", form)
    assert answer.code == 2
    assert f"{shard}: bytes 0 to " in answer.err
    assert list(out.parent.iterdir()) == []
    out.write_text("old")
    assert stepwell("export", run, out, "--format", form, "--force").code == 2
    assert (out.read_text(), len(list(out.parent.iterdir()))) == ("old", 1)


def test_a_kill_in_the_middle_leaves_the_old_file(made_run: Path, tmp_path: Path) -> None:
    """Killed where the complete file is about to get its name."""
    out = tmp_path / "out"
    out.write_text("old")
    code = (
        "import os, signal, sys\n"
        "from stepwell.storage.store import files\n"
        "files.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from stepwell.tools.cli.main import main\n"
        f"main(['export', {str(made_run)!r}, {str(out)!r}, '--force'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert out.read_text() == "old"
    (temporary,) = [path for path in tmp_path.iterdir() if path != out]
    assert len(safetensors.torch.load_file(temporary)) > 20  # complete, and synced, before it gets the name


def test_the_run_is_not_touched(run: Path, tmp_path: Path) -> None:
    before = listing(run)
    good("export", run, tmp_path / "a")
    good("export", run, tmp_path / "b", "--format", "torch")
    assert listing(run) == before


def test_one_rank_is_exported_to_the_same_bytes_as_ever(tmp_path: Path) -> None:
    """The digest is that of the first version that exported, which knew one rank only."""
    good("export", GOLDEN, tmp_path / "out")
    found = hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()
    assert found == "5a96cadf9348ac6cf645093eaaad662e7e54b4c4fd43822a46fe5bf2362051c2"


def test_a_model_in_the_way_of_hugging_face(made_run: Path, tmp_path: Path) -> None:
    good("export", made_run, tmp_path / "one", "--format", "hf")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    document = good("export", made_run, tmp_path / "many", "--format", "hf", "--shard-size", "100B", "--json").json
    names = sorted(path.name for path in (tmp_path / "many").iterdir())
    *shards, index_name = names
    assert index_name == "model.safetensors.index.json" and len(shards) > 2
    assert shards == [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    index = json.loads((tmp_path / "many" / index_name).read_text())
    assert list(index) == ["metadata", "weight_map"] and set(index["weight_map"].values()) == set(shards)
    expected = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys() and document["tensors"] == len(expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for shard in shards:
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert all(same(file.get_tensor(name), expected[name]) for name in file.keys())  # noqa: SIM118
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
            assert sum(sizes) <= 100 or len(sizes) == 1
    model = Net()
    del model.turns
    model.load_state_dict({name: t for name, t in expected.items() if name != "turns"}, strict=False)
    assert same(model.norm.running_mean, leaves(made_run)["model/norm.running_mean"])
    assert "bad" in stepwell("export", made_run, tmp_path / "x", "--format", "hf", "--shard-size", "bad").err
    assert "needs --format hf" in stepwell("export", made_run, tmp_path / "x", "--shard-size", "1GB").err
    assert "'ema'" in stepwell("export", made_run, tmp_path / "x", "--format", "hf", "--only", "ema").err


def test_for_dcp(made_run: Path, tmp_path: Path) -> None:
    """Stock DCP, without a process group, back to the nested state; keys that are numbers become text there."""
    answer = good("export", made_run, tmp_path / "dcp", "--format", "dcp")
    assert "notes/phase: enum -> str" in " ".join(answer.out.split())
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back")
    state, expected = torch.load(tmp_path / "back", weights_only=False), leaves(made_run)
    for name, tensor in state["model"].items():
        assert same(tensor, expected["model/encoder.weight" if name == "decoder.weight" else f"model/{name}"]), name
    assert same(state["optimizer"]["state"]["0"]["exp_avg"], expected["optimizer/state/0/exp_avg"])
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-2
    assert state["notes"]["tuple"] == (1, None, True, "text") and state["notes"]["seen"] == {1, 2}
    assert state["notes"]["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    live = {"model": Net().state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(live, checkpoint_id=tmp_path / "dcp")
    assert same(live["model"]["low"], expected["model/low"])
    good("export", made_run, tmp_path / "model", "--format", "dcp", "--only", "model")
    assert (tmp_path / "model" / "__0_0.distcp").stat().st_size < (tmp_path / "dcp" / "__0_0.distcp").stat().st_size


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_folder_is_replaced_only_if_an_export_wrote_it(form: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "folders" / "out"
    assert "no such directory" in stepwell("export", run, out, "--format", form).err
    out.mkdir(parents=True)
    good("export", run, out, "--format", form)  # an empty one is as good as none
    before = listing(out)
    assert "use --force to replace" in stepwell("export", run, out, "--format", form).err
    good("export", run, out, "--format", form, "--force")
    assert listing(out) == before
    shard = run / DIRECTORY / "rank-00000.safetensors"
    flip(shard, shard.stat().st_size - 3)
    answer = stepwell("export", run, out, "--format", form, "--force")
    assert answer.code == 2 and "bytes 0 to " in answer.err
    assert listing(out) == before and list(out.parent.iterdir()) == [out]
    (out / "config.json").write_text("precious")
    assert "contains config.json" in stepwell("export", run, out, "--format", form, "--force").err
    assert (out / "config.json").read_text() == "precious"
    file = tmp_path / "file"
    file.write_text("precious")
    assert "is a file" in stepwell("export", run, file, "--format", form, "--force").err


@pytest.mark.soak
def test_a_large_one_is_not_held_in_memory(tmp_path: Path) -> None:
    """96 MB of state, exported by a process that may take 64 MB of data: blocks pass through."""
    script = tmp_path / "large.py"
    script.write_text(
        "import sys, torch, stepwell\n"
        "state = {'w': torch.arange(24 * 1024 * 1024, dtype=torch.float32), 'n': torch.ones(3, dtype=torch.int8)}\n"
        "ckpt = stepwell.Checkpointer(sys.argv[1], policy=stepwell.Never(), state=state)\n"
        "ckpt.restore(); ckpt.save().wait(60); ckpt.close(save=False)\n"
    )
    env = {**os.environ, "STEPWELL_LINGER": "0.1"}
    subprocess.run([sys.executable, script, tmp_path / "run"], check=True, env=env, stderr=subprocess.DEVNULL)
    code = (
        "import resource, sys\n"
        "from stepwell.tools.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (64 << 20, 64 << 20))\n"
        "main(sys.argv[1:])\n"
    )

    def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    done = limited("export", str(tmp_path / "run"), str(tmp_path / "out"), "--only", "state")
    assert done.returncode == 0, done.stderr
    folder = limited("export", str(tmp_path / "run"), str(tmp_path / "hf"), "--only", "state", "--format", "hf")
    assert folder.returncode == 0, folder.stderr
    found = safetensors.torch.load_file(tmp_path / "out")
    assert torch.equal(found["w"], torch.arange(24 * 1024 * 1024, dtype=torch.float32))
    assert found["n"].tolist() == [1, 1, 1]
    for command in (["verify", str(tmp_path / "run")], ["diff", str(tmp_path / "run"), str(tmp_path / "run")]):
        assert limited(*command).returncode == 0
    control = limited("export", str(tmp_path / "run"), str(tmp_path / "control"), "--format", "torch")
    assert control.returncode != 0  # that way holds the state in memory, and the limit is real
