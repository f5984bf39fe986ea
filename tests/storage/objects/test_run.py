"""Whole runs in a bucket: real trainers and agents, killed at every point of storage, ended with the same bits."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell as stepwell_api
from stepwell.storage.store import catalog, files, objects
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Ending, Process, Run, wait_for
from tests.storage.objects.conftest import MakeProxy, MakeRun
from tests.storage.objects.server import Server as Bucket
from tests.tools.cli.commands import good, stepwell

POINTS = (
    "shard.middle",
    "shard.durable",
    "record.durable",
    "manifest.written",
    "manifest.linked",
    "prune.begin",
    "prune.unlisted",
    "prune.middle",
)


def check_end(run: Run, reference: Ending) -> None:
    """The same bits, nothing half there, nobody left."""
    run.check_identical(reference)
    run.wait_gone()
    names = files.list_names(run.paths.root)
    for entry in catalog.scan(run.paths):
        assert entry.is_good, f"{entry.id}: {entry.damage or 'never committed'}, of {names}"


def test_a_run_ends_as_in_a_directory(make_run: MakeRun, reference: Ending) -> None:
    run = make_run()
    assert run.start().wait() == 0, run.trainers[0].log()
    check_end(run, reference)
    assert len(run.good()) == 2
    run.wait_gone()
    there = files.list_names(run.paths.root)
    assert {"run.json", "lineage", "events.jsonl", "progress", "history.json"} <= set(there), there


SHORT = {
    ("shard.middle", "agent"),
    ("shard.durable", "both"),
    ("manifest.written", "both"),
    ("manifest.linked", "agent"),
}
"""Those that are played each time; the others are left to `make soak`."""
SCENES = [
    pytest.param(point, whom, marks=[] if (point, whom) in SHORT else pytest.mark.soak)
    for point in POINTS
    for whom in ("agent", "both")
]


@pytest.mark.parametrize(("point", "whom"), SCENES)
def test_killed_at(point: str, whom: str, make_run: MakeRun, reference: Ending, tmp_path: Path) -> None:
    """The agent alone, which is replaced; or with its trainer, and all begins again from the bucket."""
    run = make_run()
    mark = tmp_path / "mark"
    stop = ":stop" if whom == "both" else ""
    trainer = run.start(STEPWELL_CRASH=f"agent!{point}:0:2{stop}", STEPWELL_CRASH_MARK=str(mark))
    if whom == "both":
        wait_for(lambda: mark.exists() and mark.read_text(), f"{point} is reached")
        agent = Process(int(mark.read_text()))
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL
        agent.kill()
        agent.close()
        run.wait_gone()
        run.finish()
    else:
        assert trainer.wait() == 0, trainer.log()
        assert mark.exists()
    check_end(run, reference)


def test_another_machine_goes_on(make_run: MakeRun, reference: Ending, tmp_path: Path) -> None:
    """No memory and no desk: what the run knows of itself comes from the bucket too."""
    run = make_run(TRAIN_PACE="0.02")
    trainer = run.start()
    wait_for(lambda: run.newest_step() >= 12, "step 12 is committed")
    trainer.kill()
    trainer.wait()
    paths = run.paths
    here, there = paths.history.read_bytes(), paths.root / "history.json"
    wait_for(lambda: files.exists(there) and files.get(there) == here, "the agent has copied the desk")
    run.kill_agents()
    shutil.rmtree(paths.desk)
    run.finish()
    restored = run.events("restore")
    assert restored and restored[-1]["source"] == "disk" and restored[-1]["step"] >= 12
    history = json.loads(paths.history.read_bytes().splitlines()[0])
    assert history["failures"] == 1
    run.check_identical(reference)


def test_frozen_leaves_are_sent_once(
    address: ObjectPath, make_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket copies them itself from checkpoint to checkpoint."""
    proxy = make_proxy()
    base, head = torch.nn.Linear(64, 64).requires_grad_(False), torch.nn.Linear(64, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")  # for the agent
    objects._client.cache_clear()
    tracked: dict[str, Any] = {"base": base, "head": head, "optimizer": optimizer}
    with stepwell_api.Checkpointer(str(address), policy=stepwell_api.Never(), track=tracked) as ckpt:
        for _ in range(4):
            optimizer.zero_grad()
            head(base(torch.randn(2, 64))).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save().wait()
    objects._client.cache_clear()
    entries = [entry for entry in catalog.scan(RunPaths(address)) if entry.is_good]
    assert len(entries) == 2
    for entry in entries:
        assert "rank-00000.frozen.safetensors" in files.list_names(entry.path)
    good("verify", address)
    sent = [path for method, path, _ in proxy.seen if method == "POST" and "frozen" in path and "uploads" in path]
    assert len(sent) == 1


def test_a_state_without_room_in_memory(make_run: MakeRun, reference: Ending) -> None:
    """Streamed saves: chunk by chunk into the bucket."""
    run = make_run(TRAIN_HOST_MEMORY="16384")
    assert run.start().wait() == 0, run.trainers[0].log()
    check_end(run, reference)
    assert {event["strategy"] for event in run.events("snapshot")} == {"streamed"}


def test_two_that_start_at_once(make_run: MakeRun) -> None:
    """Both open the same run: two lineages, and the older one may not commit any more."""
    run = make_run(TRAIN_PACE="0.01")
    trainers = [run.start(), run.start()]
    statuses = [trainer.wait() for trainer in trainers]
    assert 0 in statuses, run.log.read_text()
    run.wait_gone()
    assert files.list_names(run.paths.lineages)[:2] == ["0001.json", "0002.json"]
    assert all(run.verify(entry) for entry in run.good())


class Errors:
    """Every `nth` request is answered with an error, of each kind in turn."""

    def __init__(self, nth: int) -> None:
        self._nth, self._count = nth, 0

    def __call__(self, method: str, path: str) -> str | None:
        self._count += 1
        if self._count % self._nth:
            return None
        return ("500", "503", "lose", "refuse")[self._count // self._nth % 4]


def test_a_server_that_often_fails(make_run: MakeRun, make_proxy: MakeProxy, reference: Ending) -> None:
    """Every third request: errors, lost answers, broken connections. Nothing of it reaches training."""
    proxy = make_proxy(Errors(3))
    run = make_run(proxy)
    assert run.start().wait(120) == 0, run.trainers[0].log()
    check_end(run, reference)
    bad = [what for _, _, what in proxy.seen if what != "passed"]
    assert {"500", "503", "lose", "refuse"} <= set(bad)


def test_a_server_that_is_gone_for_a_while(make_run: MakeRun, make_proxy: MakeProxy, reference: Ending) -> None:
    """Training goes on without it, and what could not be written then is written later."""
    is_gone: list[bool] = []
    proxy = make_proxy(lambda method, path: "refuse" if is_gone else None)
    run = make_run(proxy, TRAIN_PACE="0.05")
    trainer = run.start()
    wait_for(lambda: run.newest_step() >= 8, "step 8 is committed")
    is_gone.append(True)
    before = len(proxy.seen)
    wait_for(lambda: len(proxy.seen) > before, "the server is missed")
    is_gone.clear()
    assert trainer.wait(120) == 0, trainer.log()
    check_end(run, reference)


def test_a_server_that_is_killed(
    make_run: MakeRun, reference: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Bucket(tmp_path / "bucket")
    own.start()
    try:
        for key, value in own.environment().items():
            monkeypatch.setenv(key, value)
        objects._client.cache_clear()
        run = make_run(**own.environment(), TRAIN_PACE="0.05")
        trainer = run.start()
        wait_for(lambda: run.newest_step() >= 8, "step 8 is committed")
        own.kill()
        own.start()
        assert trainer.wait(120) == 0, trainer.log()
        check_end(run, reference)
    finally:
        own.stop()


def test_damage_is_found_and_the_older_one_is_taken(make_run: MakeRun) -> None:
    run = make_run(TRAIN_EPOCHS="2")
    assert run.start().wait() == 0, run.trainers[0].log()
    run.wait_gone()
    newest, older = run.good()
    shard = newest.path / "rank-00000.safetensors"
    data = bytearray(files.get(shard))
    data[len(data) // 2] ^= 4
    assert isinstance(shard, ObjectPath)
    objects.put(shard, bytes(data))
    run.check_newest = lambda: 0  # type: ignore[method-assign]
    trainer = run.start(TRAIN_EPOCHS="2")
    assert trainer.wait() == 0, trainer.log()
    began = run.opening(trainer)
    assert began is not None and began["step"] == older.id.step
    assert run.events("damage")


def test_the_commands(make_run: MakeRun, address: ObjectPath, tmp_path: Path) -> None:
    run = make_run(TRAIN_EPOCHS="2")
    assert run.start().wait() == 0, run.trainers[0].log()
    run.wait_gone()
    shutil.rmtree(run.paths.desk)  # as seen from another machine
    document: dict[str, Any] = good("ls", address, "--json").json
    assert len(document["checkpoints"]) == 2 and document["run"] == str(address)
    newest = run.good()[0]
    for words in (("verify", address), ("why", address), ("show", f"{address}@24"), ("show", newest.path)):
        good(*words)
    above, nothing = stepwell("ls", address.parent), stepwell("ls", address.parent / "nothing")
    assert above.code == nothing.code == 2 and str(address) in above.err
    good("export", address, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()
    good("diff", address, newest.path)


def test_clean_and_prune(make_run: MakeRun, address: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """What died halfway goes; what is whole stays; a run that somebody may work on is left alone."""
    run = make_run(TRAIN_EPOCHS="2")
    assert run.start().wait() == 0, run.trainers[0].log()
    run.wait_gone()
    left = address / "step-000000000999.l0001"
    files.put(left / "rank-00000.safetensors", b"half", point="shard")
    assert left.name in good("clean", address).out
    assert not files.is_directory(left) and len(run.good()) == 2
    told = good("prune", address, "--dry-run").out
    assert told.startswith("keeps the newest 2") and ", as the run does" in told
    good("prune", address, "--keep", "2")
    assert len(run.good()) == 2
    files.remove(address / "progress")  # nobody knows who worked on it, and it was written to just now
    shutil.rmtree(RunPaths(address).desk)
    files.put(left / "rank-00000.safetensors", b"half", point="shard")
    assert "skipped: " in good("clean", address).out
    assert files.is_directory(left)


def test_dcp_reads_it(address: ObjectPath) -> None:
    """`torch.distributed.checkpoint` through our reader, straight from the bucket."""
    import torch.distributed.checkpoint as dcp

    from stepwell.adapters.dcp import StepwellReader

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepwell_api.Checkpointer(str(address), model=model, optimizer=optimizer) as ckpt:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        ckpt.step()
    state = {"model": torch.nn.Linear(8, 8).state_dict()}
    assert StepwellReader.validate_checkpoint_id(str(address))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: no process group
        dcp.load(state, storage_reader=StepwellReader(str(address)))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())
