"""`diff`: two checkpoints side by side; equal means equal bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.crash.harness import Server
from tests.tools.cli.commands import TRAINER, flip, good, stepwell, train


def differences(*arguments: object) -> dict[str, Any]:
    answer = stepwell("diff", *arguments, "--json")
    assert answer.code == 1, answer
    document = answer.json
    assert set(document) == {"a", "b", "equal", "equal_tensors", "equal_values", "differences"}
    keys = {"kind", "path", "a", "b", "elements", "different", "max_abs", "non_finite"}
    assert all(set(item) == keys for item in document["differences"])
    return {item["path"]: item for item in document["differences"]}


def tensor(run: Path, directory: str, name: str) -> torch.Tensor:
    with safe_open(run / directory / "rank-00000.safetensors", "pt") as shard:
        return shard.get_tensor(name)


def test_equal(made_run: Path) -> None:
    answer = good("diff", f"{made_run}@8", made_run)
    assert answer.out.startswith("no difference: ")
    document = good("diff", made_run, made_run / "step-000000000008.l0002", "--json").json
    assert document["equal"] is True
    assert document["differences"] == []
    assert document["equal_tensors"] > 20


def test_two_steps(made_run: Path) -> None:
    found = differences(f"{made_run}@4", f"{made_run}@6")
    weight = found["model/encoder.weight"]
    a, b = (
        tensor(made_run, name, "model/encoder.weight")
        for name in ("step-000000000004.l0001", "step-000000000006.l0002")
    )
    assert weight["kind"] == "bytes"
    assert weight["max_abs"] == (a.double() - b.double()).abs().max().item()
    assert weight["different"] == (a != b).sum().item()
    assert weight["elements"] == 36
    assert found["model/decoder.weight"]["max_abs"] == weight["max_abs"]
    step = found["stepwell/step"]
    assert (step["kind"], step["a"], step["b"]) == ("value", "4", "6")
    assert "model/base.weight" not in found and "model/low" not in found and "notes/phase" not in found


def test_the_answer_for_a_person(made_run: Path) -> None:
    answer = stepwell("diff", f"{made_run}@4", f"{made_run}@6")
    lines = answer.out.splitlines()
    assert answer.code == 1
    assert lines[0] == f"a: {made_run}/step-000000000004.l0001"
    assert lines[2].split() == ["what", "where", "how"]
    assert ["value", "stepwell/step", "4", "->", "6"] in [line.split() for line in lines]
    assert any(line.startswith("bytes  model/encoder.weight ") and "36 of 36, by 0.0" in line for line in lines)


def test_a_number_that_is_none_is_counted(made_run: Path) -> None:
    found = differences(f"{made_run}@8", f"{made_run}@9")["model/encoder.weight"]
    assert found["non_finite"] == 1
    assert 0 < found["max_abs"] < 1


def test_a_file_that_differs(made_run: Path) -> None:
    found = differences(f"{made_run}@6", f"{made_run}@8")
    assert found["rank-00000.file.vocabulary.txt"]["kind"] == "only in b"


def test_other_runs_and_shapes(server: Server, made_run: Path, tmp_path: Path) -> None:
    """A run of another script: an object missing, another shape, another type, another key."""
    script = tmp_path / "other.py"
    text = TRAINER.read_text()
    for old, new in [
        ("torch.empty(0, 3)", "torch.empty(0, 4)"),
        ("to(torch.bfloat16)", "to(torch.float16)"),
        ('3: "an int key"', '"3": "an int key"'),
        ('"tuple": (1, None', '"tuple": [1, None'),
        ('True, "text")', 'True, "text"]'),
        ("self.decoder.weight = self.encoder.weight", "pass"),
        ('"phase": Phase.WARM_UP', '"empty": {}'),
    ]:
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    other = tmp_path / "other"
    train(server, other, "--until", 4, "--save", 4, script=script)
    found = differences(f"{made_run}@4", other)
    assert (found["model/nothing"]["kind"], found["model/nothing"]["b"]) == ("shape", "[0, 4]")
    assert (found["model/low"]["a"], found["model/low"]["b"]) == ("bfloat16", "float16")
    assert (found["notes/3"]["a"], found["notes/3"]["b"]) == ("key int", "key str")
    assert (found["notes/tuple"]["a"], found["notes/tuple"]["b"]) == ("tuple", "list")
    assert (found["notes/phase"]["kind"], found["notes/phase"]["a"]) == ("only in a", "Phase.WARM_UP")
    assert (found["notes/empty"]["kind"], found["notes/empty"]["b"]) == ("only in b", "dict")
    assert found["optimizer/state/3/exp_avg"]["kind"] == "only in b"
    tied = [
        item
        for item in stepwell("diff", f"{made_run}@4", other, "--json").json["differences"]
        if item["kind"] == "tied"
    ]
    assert [item["path"] for item in tied] == ["model/decoder.weight"]
    assert tied[0]["a"] == "tied to model/encoder.weight"


def test_a_damaged_byte_is_an_error_and_no_difference(run: Path) -> None:
    """A control for "every byte that is compared was checked": without the check this would print a difference."""
    shard = run / "step-000000000006.l0002" / "rank-00000.safetensors"
    flip(shard, 5000)
    answer = stepwell("diff", f"{run}@6", f"{run}@8")
    assert answer.code == 2
    assert f"{shard}: bytes 0 to " in answer.err


def test_many_values_of_a_sequence_are_told_as_one(server: Server, run: Path, tmp_path: Path) -> None:
    """Python's generator is 625 numbers; lineage 2 never drew from it, so another process is needed."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    script = tmp_path / "draws.py"
    text = TRAINER.read_text()
    script.write_text(
        text.replace("        ckpt.step()\n", "        __import__('random').seed(step)\n        ckpt.step()\n")
    )
    train(server, other, "--until", 10, "--save", 10, script=script)
    found = differences(f"{run}@8", f"{other}@10")
    generator = found["stepwell/rng/python/1"]
    assert (generator["elements"], generator["kind"]) == (625, "value")
    assert 600 < generator["different"] <= 625
    assert not [path for path in found if path.startswith("stepwell/rng/python/1/")]
