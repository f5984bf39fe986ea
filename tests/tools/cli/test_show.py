"""`show`: the tree of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.tools.cli.commands import TRAINER, good
from tests.training.loop.test_pace import automatic


def test_the_tree(made_run: Path) -> None:
    out = good("show", f"{made_run}@4").out
    lines = [line.rstrip() for line in out.splitlines()]
    words = [line.split() for line in lines]
    assert lines[0].startswith(f"{made_run}/step-000000000004.l0001: ")
    assert ["base.weight", "float32", "[6,", "6]", "144", "B", "parameter"] in words
    assert ["low", "bfloat16", "[5]", "10", "B", "buffer"] in words
    assert ["turns", "complex64", "[2]", "16", "B", "buffer"] in words
    assert ["nothing", "float32", "[0,", "3]", "0", "B", "buffer"] in words
    assert ["decoder.weight", "same", "as", "model/encoder.weight"] in words
    assert ["exp_avg_sq", "float32", "[6,", "6]", "144", "B", "moment2"] in words
    assert ["lr", "0.01"] in words
    assert ["phase", "Phase.WARM_UP"] in words
    assert ["array", "numpy", "int64", "[2,", "3]", "48", "B", "value"] in words
    assert ["3", "'an", "int", "key'"] in words
    assert any(line.endswith("(625 in all)") for line in lines)
    assert "_metadata" not in out and "(metadata)" not in out


def test_files_of_the_user(made_run: Path) -> None:
    out = good("show", made_run).out
    assert "vocabulary.txt" in out.splitlines()[-1]
    document = good("show", made_run, "--json").json
    assert document["files"] == [
        {
            "name": "vocabulary.txt",
            "stored_as": "rank-00000.file.vocabulary.txt",
            "nbytes": TRAINER.stat().st_size,
        }
    ]


def test_json(made_run: Path) -> None:
    document = good("show", made_run, "--step", 6, "--json").json
    assert document["step"] == 6
    assert document["lineage"] == 2  # the live one of the two
    tensors = {item["path"]: item for item in document["tensors"]}
    assert tensors["model/decoder.weight"]["leaf"] == "model/encoder.weight"
    assert tensors["model/low"] == {
        "path": "model/low",
        "leaf": "model/low",
        "kind": "tensor",
        "dtype": "bfloat16",
        "shape": [5],
        "nbytes": 10,
        "role": "buffer",
        "device": "cpu",
    }
    values = {item["path"]: item["value"] for item in document["values"]}
    assert values["stepwell/step"] == "6"
    assert values["notes/limits/0"] == "inf"
    assert values["notes/number"] == "numpy <f4 0.5"


def test_without_a_step_it_is_the_one_a_restart_would_use(made_run: Path) -> None:
    assert good("show", made_run, "--json").json["checkpoint"].endswith("step-000000000008.l0002")


def test_an_abandoned_one_by_its_directory(made_run: Path) -> None:
    document = good("show", made_run / "step-000000000006.l0001", "--json").json
    assert (document["step"], document["lineage"]) == (6, 1)


def test_a_suspect_one_says_so(made_run: Path) -> None:
    assert "suspect (1 non-finite" in good("show", f"{made_run}@9").out.splitlines()[0]


def test_the_policy_of_a_run_that_decides(tmp_path: Path) -> None:
    small = automatic(tmp_path / "run")
    small.train_until_decided()
    small.ckpt.close()
    out = good("show", "--policy", tmp_path / "run").out
    assert " ".join(out.split()).startswith("Saving every ")
    assert "bound by" in out and ("overhead" in out or "storage" in out)
    document = good("show", "--policy", tmp_path / "run", "--json").json
    assert document["failures"] == 0 and document["decisions"][-1]["term"] in ("overhead", "storage")


def test_the_policy_of_a_run_with_a_fixed_one(made_run: Path) -> None:
    assert "has not chosen an interval" in good("show", "--policy", made_run).out
