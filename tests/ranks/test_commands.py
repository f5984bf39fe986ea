"""The command line on checkpoints of four ranks: sizes, bytes, voids, who is alive, and what is left over."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.manifest import Void
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, catalog
from stepwell.storage.store.lineage import read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId
from tests.crash.harness import wait_for
from tests.ranks.conftest import MakeJob, Straight
from tests.ranks.launch import Job
from tests.tools.cli.commands import flip, good, stepwell

WORLD = 4
ARGUMENTS = ("--samples", 96, "--epochs", 2, "--every", 2, "--keep", 4)


@pytest.fixture
def job(straight: Straight) -> Job:
    """A run of four ranks that ended. Not to be changed."""
    return straight(WORLD, *ARGUMENTS)


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job.where, tmp_path / "run"))


def test_sizes_and_bytes_of_all_ranks(job: Job, run: Path) -> None:
    listed = good("ls", run, "--json").json["checkpoints"]
    for item in listed:
        files = sorted((run / item["checkpoint"]).glob("rank-*.safetensors"))
        assert item["world_size"] == WORLD and item["nbytes"] == sum(file.stat().st_size for file in files)
    assert "4 ranks" in good("ls", run).out
    shown = good("show", run, "--json").json
    tensors = {item["path"]: item for item in shown["tensors"]}
    assert tensors["model/0.weight"]["shape"] == [32, 8] and tensors["model/0.weight"]["nbytes"] == 32 * 8 * 4
    assert tensors["stepwell/rng/torch"]["of_each_rank"] is True
    assert (shown["world_size"], shown["nbytes"]) == (WORLD, listed[0]["nbytes"])
    assert "by 4 ranks" in " ".join(good("show", run).out.split())
    good("verify", run)
    for rank in range(WORLD):
        flip(run / listed[0]["checkpoint"] / f"rank-{rank:05d}.safetensors", 5000)
    answer = stepwell("verify", run)
    assert answer.code == 1 and answer.out.count("have checksum") == WORLD, answer.out


def test_a_tensor_that_the_records_do_not_make_up_is_damage(run: Path) -> None:
    """A record whose box says other rows than it stores: all checksums are right."""
    entry = catalog.scan(RunPaths(run))[0]
    assert entry.manifest is not None
    path = entry.path / "rank-00001.json"
    record = Record.load(path.read_bytes(), path=str(path))
    (leaf, *_) = [leaf for leaf in record.leaves if leaf.shape and leaf.offsets[0]]
    moved = replace(leaf, offsets=(leaf.offsets[0] - 1, *leaf.offsets[1:]))
    path.write_bytes(replace(record, leaves=tuple(moved if item is leaf else item for item in record.leaves)).dump())
    refs = list(entry.manifest.records)
    refs[1] = replace(refs[1], nbytes=path.stat().st_size, digest=document_digest(path.read_bytes()))
    (entry.path / "manifest.json").write_bytes(replace(entry.manifest, records=tuple(refs)).dump())
    answer = stepwell("verify", entry.path)
    assert answer.code == 1 and f"do not make up leaf '{leaf.name}'" in " ".join(answer.out.split())
    assert "do not make up leaf" in stepwell("export", entry.path, run.parent / "x").err.replace("\n", " ")


def test_generators_of_every_rank_are_compared(job: Job, run: Path) -> None:
    listed = good("ls", run, "--json").json["checkpoints"]
    newest = listed[0]["checkpoint"]
    older = next(item["checkpoint"] for item in listed if item["step"] < listed[0]["step"])
    same = good("diff", run / newest, job.where / newest, "--json").json
    tensors = good("show", run, "--json").json["tensors"]
    own = [item for item in tensors if item.get("of_each_rank")]
    assert same["equal"] and own and same["equal_tensors"] == len(tensors) + (WORLD - 1) * len(own)
    found = stepwell("diff", run / newest, run / older, "--json").json["differences"]
    paths = [item["path"] for item in found]
    assert "model/0.weight" in paths and "model/0.weight (rank 1)" not in paths
    assert [f"stepwell/rng/torch (rank {rank})" in paths for rank in (1, 2, 3)] == [True] * 3
    assert sum(path.startswith("stepwell/step") for path in paths) == 1


def test_void_directories_say_why(job: Job, run: Path) -> None:
    newest = good("ls", run, "--json").json["checkpoints"][0]
    paths = RunPaths(run)
    given_up = CheckpointId(newest["step"] + 2, 0, newest["lineage"])
    assemble.leave_void(paths, Void(read_run(paths).id, given_up, 2, "its disk is full"))
    ended = CheckpointId(newest["step"] + 4, 0, newest["lineage"])
    assemble.leave_void(paths, Void(read_run(paths).id, ended, 3, "never mind"))
    assemble.end_void(paths, Void(read_run(paths).id, ended, 1, "rank 1: a leaf changed"))
    said = " ".join(good("why", run).out.split())
    assert f"{given_up} void, so never committed: rank 2: its disk is full" in said
    assert f"{ended} void, so never committed: rank 1: a leaf changed" in said
    listed = good("ls", run, "--json").json["checkpoints"]
    assert [item["void"] for item in listed[:3]] == ["rank 1: a leaf changed", "rank 2: its disk is full", None]
    assert "void" in good("ls", run).out
    (run / "spare.rank-00003.l0001.tmp").write_bytes(b"left by rank 3")
    removed = {item["path"] for item in good("clean", run, "--json").json["runs"][0]["removed"]}
    assert removed == {given_up.directory, ended.directory, "spare.rank-00003.l0001.tmp"}
    assert good("why", run, "--json").json["chosen"] == newest["checkpoint"]
    good("prune", run, "--keep", 2)
    assert len(good("ls", run, "--json").json["checkpoints"]) == 2
    good("verify", run)


def test_a_run_is_alive_while_any_rank_is(make_job: MakeJob) -> None:
    job = make_job("job", *ARGUMENTS, STEPWELL_LINGER="600")
    barrier = job.barrier("middle")
    launch = job.launch(WORLD, "--stop", f"5:{barrier}")
    job.wait_at(barrier, launch)
    job.wait_committed(4, launch)
    (job.where / "step-000000000099.l0001").mkdir()  # what a dead rank would leave
    document = good("ls", job.where, "--json").json
    assert sorted(document["trainer_pids"]) == sorted(rank.pid for rank in launch.ranks)
    assert document["alive"] and len(document["agent_pids"]) == WORLD
    assert "trainers, processes" in " ".join(good("ls", job.where).out.split())
    for rank in (0, 1, 2):  # the trainer and the agent of all ranks but the last: rank 0 looks dead
        launch.kill([rank])
        job.kill_agents_of(rank)
    wait_for(lambda: len(good("ls", job.where, "--json").json["agent_pids"]) == 1, "the killed agents are gone")
    document = good("ls", job.where, "--json").json
    assert (document["alive"], document["trainer_pids"]) == (True, [launch.ranks[3].pid])
    assert "skipped: " in good("clean", job.where).out
    assert stepwell("prune", job.where).code == 2
    launch.kill([3])
    assert "skipped: " in good("clean", job.where).out  # its agent holds memory still
    job.kill_agents_of(3)
    wait_for(lambda: not good("ls", job.where, "--json").json["alive"], "the last killed agent is gone")
    good("clean", job.where)
    assert not (job.where / "step-000000000099.l0001").exists()
    good("verify", job.where)
