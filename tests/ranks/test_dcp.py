"""torch.distributed.checkpoint in and out: a run goes on from a real DCP checkpoint, `dcp.load` reads ours, and what is
exported of many ranks is, for the stock libraries, the state that was saved. Every tensor is compared."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stepwell import DamagedError
from stepwell.adapters.dcp import StepwellReader, load_into
from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import HERE, Job
from tests.ranks.sharded import Net, named_tensors
from tests.tools.cli.commands import flip, good, stepwell


class Interchange(Job):
    script = HERE / "dcp_rank.py"

    def do(self, task: str, kind: str, world: int, *arguments: object) -> dict[str, Any]:
        self.launch(world, "--task", task, "--kind", kind, *arguments).wait_well(120)
        found: dict[str, Any] = json.loads(Path(f"{self.where}.{task}.json").read_text())
        return found


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def of_state(model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], between: str) -> dict[str, str]:
    """Digests of an exported state, as the ranks wrote theirs."""
    names = [name for name, _ in Net(24, 50, 2).named_parameters()]
    found = {name: digest(tensor) for name, tensor in model.items()}
    for key, tensor in optimizer.items():
        number, _, kind = key.removeprefix(f"state{between}").partition(between)
        found[f"{names[int(number)]}/{kind}"] = digest(tensor)
    return found


def fresh() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(9)
    model = Net(24, 50, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=3.0)


def live(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in named_tensors(model, optimizer).items()}


CASES = [("fsdp", 4, "named", "tp", 4), soak("ddp", 4, "raw", "fsdp", 3), soak("fsdp", 4, "flat", "ddp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world", "style", "next_kind", "next_world"), CASES)
def test_a_run_goes_on_from_dcp_and_is_read_and_exported(
    kind: str, world: int, style: str, next_kind: str, next_world: int, make_job: MakeJob, tmp_path: Path
) -> None:
    job, folder = make_job("job", kind=Interchange), tmp_path / "dcp"
    assert isinstance(job, Interchange)
    theirs = job.do("save", kind, world, "--folder", folder, "--style", style)
    ours = job.do("go-on", next_kind, next_world, "--folder", folder)
    assert ours["loaded"] == theirs["saved"]
    assert (ours["step"], ours["lr"]) == (2, theirs["lr"])
    again = job.do("go-on", "fsdp", 2, "--folder", folder)  # the run's own checkpoint comes first now
    assert (again["loaded"], again["step"]) == (ours["saved"], 4)
    read = job.do("load", "fsdp", 3, "--style", "raw" if style == "raw" else "named")
    assert (read["loaded"], read["lr"]) == (again["saved"], theirs["lr"])
    check_exports(job.where, 2, ours["saved"], tmp_path)
    check_one_process(job.where, again["saved"])
    job.check_nothing_left()


def check_exports(run: Path, step: int, expected: dict[str, str], out: Path) -> None:
    """The checkpoint of many ranks as each kind of file, opened by the stock library for it."""
    at = f"{run}@{step}"
    good("export", at, out / "all.safetensors")
    found = safetensors.torch.load_file(out / "all.safetensors")
    of = {
        name: {k.removeprefix(f"{name}/"): t for k, t in found.items() if k.startswith(f"{name}/")}
        for name in ("model", "optimizer")
    }
    assert of_state(of["model"], of["optimizer"], "/") == expected
    notes = good("export", at, out / "state.pt", "--format", "torch", "--json").json["notes"]
    assert any("those of rank 0" in note and "rng" in note for note in notes), notes
    state = torch.load(out / "state.pt", weights_only=True)
    flat = {f"state.{n}.{k}": t for n, kinds in state["optimizer"]["state"].items() for k, t in kinds.items()}
    assert of_state(state["model"], flat, ".") == expected
    assert state["stepwell"]["step"] == step
    good("export", at, out / "hf", "--format", "hf", "--shard-size", "8KB")
    index = json.loads((out / "hf" / "model.safetensors.index.json").read_text())
    parts = {file: safetensors.torch.load_file(out / "hf" / file) for file in set(index["weight_map"].values())}
    weights = {name: parts[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(part) for part in parts.values()) == len(weights) == len(state["model"]) and len(parts) > 2
    assert {name: digest(tensor) for name, tensor in weights.items()} == {name: expected[name] for name in weights}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    good("export", at, out / "as-dcp", "--format", "dcp")
    model, optimizer = fresh()
    load_into(out / "as-dcp", model=model, optimizer=optimizer)
    assert live(model, optimizer) == expected
    dcp_to_torch_save(out / "as-dcp", out / "back.pt")  # DCP's own way back, to the nested state
    back = torch.load(out / "back.pt", weights_only=False)
    assert digest(back["model"]["norm.weight"]) == expected["norm.weight"]
    assert back["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


def check_one_process(run: Path, expected: dict[str, str]) -> None:
    """Our reader without a process group, into a model and an optimizer that never stepped; and one wrong bit."""
    model, optimizer = fresh()
    load_into(StepwellReader(run), model=model, optimizer=optimizer)
    assert live(model, optimizer) == expected
    model, _ = fresh()
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=StepwellReader(run, step=4))
    assert live(model, torch.optim.SGD(model.parameters())) == {name: expected[name] for name in model.state_dict()}
    newest = max(path for path in run.iterdir() if path.name.startswith("step-"))
    shard = newest / "rank-00001.safetensors"
    flip(shard, shard.stat().st_size - 3)
    with pytest.raises(DamagedError, match="have checksum"):
        load_into(StepwellReader(run), model=model)
    assert stepwell("export", run, run.parent / "x", "--step", 4).code == 2
    assert not (run.parent / "x").exists()
    assert "damaged" in stepwell("verify", f"{run}@4").out


def test_stages_of_a_pipeline_are_one_model_for_others(make_job: MakeJob, tmp_path: Path) -> None:
    """Each rank names other tensors: rank 0's tree alone would lose all but its own."""
    job = make_job("job", kind=Interchange)
    job.launch(3, "--task", "stages").wait_well()
    out = tmp_path / "model.safetensors"
    good("export", job.where, out, "--only", "model")
    found = safetensors.torch.load_file(out)
    assert {name: tuple(tensor.shape) for name, tensor in found.items() if name.endswith("weight")} == {
        f"stage{rank}.weight": (2 + rank, 3) for rank in range(3)
    }
    assert all(bool((found[f"stage{rank}.weight"] == rank).all()) for rank in range(3))
    shown = [item["path"] for item in good("show", job.where, "--json").json["tensors"]]
    assert {f"model/{name}" for name in found} <= set(shown)
    good("diff", job.where, job.where)
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 2 + rank) for rank in range(3)})
    load_into(StepwellReader(job.where), model=model)  # one process takes all stages
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("kind", "next_kind", "next_world"), [("fsdp", "ddp", 2), soak("ddp", "fsdp", 3)])
def test_dcp_saves_with_plans_that_it_kept(kind: str, next_kind: str, next_world: int, make_job: MakeJob) -> None:
    """The second save of each rank gets the plan of its first one."""
    job = make_job("job", kind=Interchange)
    assert isinstance(job, Interchange)
    saved = job.do("write", kind, 4, "--keep-plans")
    assert [entry.id.step for entry in job.good()] == [3, 2]
    read = job.do("load", next_kind, next_world, "--style", "raw")
    assert read["loaded"] == saved["saved"]
    good("verify", job.where)


@pytest.mark.parametrize(("kind", "next_kind", "next_world"), [("fsdp", "ddp", 2), soak("ddp", "fsdp", 3)])
def test_dcp_saves_a_checkpoint_of_ours(kind: str, next_kind: str, next_world: int, make_job: MakeJob) -> None:
    """Written by 4 ranks, each tensor once; read by another number of ranks, and by every command."""
    job = make_job("job", kind=Interchange)
    assert isinstance(job, Interchange)
    saved = job.do("write", kind, 4)
    read = job.do("load", next_kind, next_world, "--style", "raw")
    assert (read["loaded"], read["lr"]) == (saved["saved"], saved["lr"])
    (entry,) = job.good()
    assert entry.id.step == 3 and entry.manifest is not None and entry.manifest.world_size == 4
    job.verify(entry)
    boxes = [(leaf.name, leaf.offsets) for record in job.records(entry) for leaf in record.leaves if not leaf.private]
    assert len(set(boxes)) == len(boxes), "something is stored twice"
    good("verify", job.where)
    job.check_nothing_left()
