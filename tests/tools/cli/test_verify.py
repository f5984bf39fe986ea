"""`verify`: reads every byte; one flipped bit anywhere is found and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.tools.cli.commands import Answer, flip, good, stepwell

STEP = "step-000000000008.l0002"


def test_a_whole_run(made_run: Path) -> None:
    answer = good("verify", made_run)
    assert answer.out.splitlines()[-1].startswith("7 checkpoints intact, ")
    assert answer.err == ""  # no bar where there is no terminal


def test_json_of_a_whole_run(made_run: Path) -> None:
    document = good("verify", made_run, "--json").json
    assert set(document) == {"run", "whole", "damage", "checkpoints"}
    assert document["whole"] is True
    assert all(
        set(item) == {"checkpoint", "step", "whole", "nbytes", "damage"} and item["damage"] == []
        for item in document["checkpoints"]
    )


def damage_of(answer: Answer) -> dict[str, list[str]]:
    return {item["checkpoint"]: item["damage"] for item in answer.json["checkpoints"] if item["damage"]}


def test_a_flipped_bit_is_named_with_file_and_range(run: Path) -> None:
    shard = run / STEP / "rank-00000.safetensors"
    flip(shard, shard.stat().st_size - 1)
    answer = stepwell("verify", run)
    assert answer.code == 1
    assert [STEP, "damaged"] in [line.split()[:2] for line in answer.out.splitlines()]
    assert re.search(rf"{re.escape(str(shard))}: bytes 0 to {shard.stat().st_size} have checksum", answer.out)
    assert "1 checkpoint damaged, 6 intact" in answer.out


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00000.frozen.safetensors",
        "rank-00000.file.vocabulary.txt",
    ],
)
def test_every_byte_of_every_file_counts(name: str, run: Path, tmp_path: Path) -> None:
    """Some bytes of each file: the first, the last, and a spread between; the exhaustive test is in tests/hostile."""
    path = run / STEP / name
    saved = tmp_path / "saved"
    shutil.copy(path, saved)
    size = path.stat().st_size
    for offset in {0, size - 1, *range(0, size, max(1, size // 8))}:
        path.unlink()  # the frozen file is one inode for all checkpoints of a lineage
        shutil.copy(saved, path)
        flip(path, offset)
        answer = stepwell("verify", run / STEP, "--json")
        assert answer.code == 1, offset
        assert list(damage_of(answer)) == [STEP], offset
        assert name in damage_of(answer)[STEP][0]


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json", "rank-00000.file.vocabulary.txt"])
def test_a_missing_or_truncated_file(name: str, run: Path) -> None:
    path = run / STEP / name
    path.write_bytes(path.read_bytes()[:-1])
    assert STEP in damage_of(stepwell("verify", run, "--json"))
    path.unlink()
    answer = stepwell("verify", run, "--json")
    assert answer.code == 1
    assert name in damage_of(answer)[STEP][0]


def test_a_missing_manifest_means_no_checkpoint(run: Path) -> None:
    (run / STEP / "manifest.json").unlink()
    document = good("verify", run, "--json").json
    assert STEP not in [item["checkpoint"] for item in document["checkpoints"]]


def test_one_step(run: Path) -> None:
    shard = run / STEP / "rank-00000.safetensors"
    flip(shard, 5000)
    good("verify", run, "--step", 4)
    assert stepwell("verify", f"{run}@8").code == 1
    good("verify", run / "step-000000000008.l0001")


def test_a_file_that_several_checkpoints_link_is_damaged_in_all_of_them(run: Path, made_run: Path) -> None:
    """copytree copies links as files, so they are linked again here, as the agent does it."""
    names = [f"step-{step:012d}.l0002" for step in (6, 8, 9)]
    frozen = [run / name / "rank-00000.frozen.safetensors" for name in names]
    assert len({(made_run / name / frozen[0].name).stat().st_ino for name in names}) == 1, "the agent links them"
    for path in frozen[1:]:
        path.unlink()
        path.hardlink_to(frozen[0])
    flip(frozen[0], 4096)
    assert set(damage_of(stepwell("verify", run, "--json"))) == set(names)


def test_the_run_itself_is_checked(run: Path) -> None:
    flip(run / "run.json", 20)
    flip(run / "lineage" / "0001.json", 20)
    answer = stepwell("verify", run)
    assert answer.code == 1
    assert f"damaged: {run}/run.json: checksum" in answer.out
    assert f"damaged: {run}/lineage/0001.json: checksum" in answer.out


def test_uncommitted_directories_are_no_checkpoints(crashed: Path) -> None:
    assert "l0003" not in good("verify", crashed).out
