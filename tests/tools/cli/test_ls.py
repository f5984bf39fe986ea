"""`ls`: one line for each checkpoint, with everything a person asks first."""

from __future__ import annotations

from pathlib import Path

from tests.tools.cli.commands import flip, good, stepwell

KEYS = {"checkpoint", "step", "repeat", "lineage", "live", "committed", "damage", "nbytes", "created", "suspect"}
MORE_KEYS = {"epoch_end", "finished", "name", "exact", "void", "world_size"}


def rows(run: Path) -> dict[str, list[str]]:
    lines = good("ls", run).out.splitlines()
    return {line.split()[0]: line.split(maxsplit=7)[1:] for line in lines[1:]}


def test_the_table(made_run: Path) -> None:
    lines = good("ls", made_run).out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "lineage", "branch", "size", "age", "flags"]
    assert [line.split()[0] for line in lines[1:]] == [
        "step-000000000009.l0002",
        "step-000000000008.l0002",
        "step-000000000008.l0001",
        "step-000000000006.l0002",
        "step-000000000006.l0001",
        "step-000000000004.l0001",
        "step-000000000002.l0001",
    ]
    assert "live" in lines[1] and lines[1].endswith("suspect")
    assert "abandoned" in lines[3]
    assert "abandoned" in lines[5] and lines[5].endswith("name best")
    assert "live" in lines[6]


def test_json_has_the_same_keys_for_every_checkpoint(crashed: Path) -> None:
    document = good("ls", crashed, "--json").json
    assert set(document) == {
        "run",
        "alive",
        "trainer_pid",
        "trainer_pids",
        "agent_pids",
        "checkpoints",
        "chains",
        "lossy_lineages",
    }
    assert all(set(item) == KEYS | MORE_KEYS for item in document["checkpoints"])
    assert not document["alive"]
    by_name = {item["checkpoint"]: item for item in document["checkpoints"]}
    best, suspect = by_name["step-000000000006.l0001"], by_name["step-000000000009.l0002"]
    assert (best["name"], best["live"], best["committed"]) == ("best", False, True)
    assert suspect["suspect"] == "1 non-finite, first model/encoder.weight"
    assert by_name["step-000000000010.l0003"]["committed"] is False


def test_an_uncommitted_directory_is_flagged(crashed: Path) -> None:
    (line,) = [line for line in good("ls", crashed).out.splitlines() if "step-000000000010.l0003" in line]
    assert line.endswith("uncommitted")


def test_a_file_that_is_too_short_is_seen_without_reading_it(run: Path) -> None:
    shard = run / "step-000000000008.l0002" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (line,) = [line for line in good("ls", run).out.splitlines() if "step-000000000008.l0002" in line]
    assert line.endswith("damaged")


def test_a_damaged_manifest_is_seen(run: Path) -> None:
    flip(run / "step-000000000008.l0002" / "manifest.json", 30)
    document = good("ls", run, "--json").json
    (item,) = [item for item in document["checkpoints"] if item["checkpoint"] == "step-000000000008.l0002"]
    assert "checksum" in item["damage"]


def test_a_run_whose_identity_is_lost_is_still_listed(run: Path) -> None:
    (run / "run.json").unlink()
    assert len(good("ls", run).out.splitlines()) == 8


def test_a_checkpoint_behind_a_link_is_not_followed(run: Path, made_run: Path) -> None:
    (run / "step-000000000099.l0002").symlink_to(made_run / "step-000000000008.l0002")
    assert "000099" not in good("ls", run).out
    assert stepwell("verify", run).code == 0
