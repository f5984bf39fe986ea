"""`why`: says what a restart then really does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwell.events.journal import read_events
from tests.crash.harness import Server
from tests.tools.cli.commands import Training, flip, good, train, wait_for


def reasons(document: Any) -> dict[str, str]:
    return {item["checkpoint"]: item["reason"] for item in document["checkpoints"]}


def restored(server: Server, run: Path) -> str:
    """Directory that a real restart of the script restores."""
    train(server, run, "--until", 0)
    return [event["directory"] for event in read_events(run / "events.jsonl") if event["kind"] == "restore"][-1]


def test_the_newest_good_one_is_chosen_as_a_restart_does(server: Server, run: Path) -> None:
    document = good("why", run, "--json").json
    assert document["chosen"] == "step-000000000008.l0002"
    assert document["memory"] is None
    found = reasons(document)
    assert found["step-000000000008.l0002"] == "newest good checkpoint, newer ones are suspect: 1"
    assert "suspect: 1 non-finite, first model/encoder.weight" in found["step-000000000009.l0002"]
    assert found["step-000000000008.l0001"].startswith("abandoned branch")
    assert restored(server, run) == document["chosen"]


def test_a_damaged_one_is_passed_over_as_a_restart_does(server: Server, run: Path) -> None:
    shard = run / "step-000000000008.l0002" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    document = good("why", run, "--json").json
    assert document["chosen"] == "step-000000000006.l0002"
    assert reasons(document)["step-000000000008.l0002"].startswith("damaged: ")
    assert restored(server, run) == document["chosen"]


def test_the_answer_for_a_person(crashed: Path) -> None:
    lines = good("why", crashed).out.splitlines()
    assert [line for line in lines if line.startswith("->")] == ["-> step-000000000008.l0002  newest good checkpoint"]
    assert any("step-000000000010.l0003  never committed" in line for line in lines)


def test_what_is_not_committed_says_what_became_of_it(run: Path, start: Callable[..., Training]) -> None:
    """Its process is alive and the disk is full: nothing died. Control: where nobody works, it has ended."""
    fault = "agent!fsync:ENOSPC:1+"
    training = start(run, "--until-file", run / "stop", "--every-step", "--restore-step", 8, STEPWELL_FAULT=fault)
    log, kept = run / "events.jsonl", (run / "events.jsonl").read_bytes()
    failed = wait_for(lambda: [e for e in read_events(log) if e["kind"] == "persist-failed"], "a write failed")[0]

    def reason() -> str:
        found = reasons(good("why", run, "--json").json)
        return next(text for name, text in found.items() if name.startswith(f"step-{failed['step']:012}.l0003"))

    told = reason()
    assert told.startswith("not committed: writing failed: [Errno 28] No space left on device"), told
    assert f"process {training.process.pid}, is running" in told
    training.kill()
    training.kill_agent()
    assert reason().startswith("never committed: writing failed: [Errno 28]")
    log.write_bytes(kept)  # a full disk may take no events either
    assert reason() == "never committed: its process ended before it wrote the manifest"


def test_what_is_being_written_is_not_said_to_have_ended(run: Path, start: Callable[..., Training]) -> None:
    training = start(run, "--until-file", run / "stop", "--restore-step", 8)
    (run / "step-000000000099.l0003").mkdir()
    told = reasons(good("why", run, "--json").json)["step-000000000099.l0003"]
    assert told.startswith("not committed: it is being written, or writing it fails; its trainer, process "), told
    training.kill()
    training.kill_agent()


def test_before_and_step(made_run: Path) -> None:
    assert good("why", made_run, "--before", 8, "--json").json["chosen"] == "step-000000000006.l0002"
    assert good("why", made_run, "--step", 2, "--json").json["chosen"] == "step-000000000002.l0001"


def test_nothing_can_be_used(run: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        flip(manifest, 10)
    answer = good("why", run)
    assert "no checkpoint can be used: restore() would raise an error" in " ".join(answer.out.split())
    assert good("why", run, "--json").json["chosen"] is None


def test_nothing_is_there(run: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        manifest.unlink()
    assert "starts fresh" in good("why", run).out


def test_a_lingering_agent_with_a_newer_snapshot_is_told(run: Path, start: Callable[..., Training]) -> None:
    """Every sync fails, so step 9 stays in memory only; the trainer dies, its agent waits for a successor."""
    broken = {"STEPWELL_FAULT": "agent!fsync:EIO:1+"}
    training = start(run, "--until-file", run / "never", "--every-step", "--restore-step", 8, **broken)

    def failed() -> list[Any]:
        events = read_events(run / "events.jsonl")
        return [event for event in events if event["kind"] == "persist-failed" and event["step"] > 8]

    wait_for(failed, "a failed write of a new step")
    alive = good("why", run).out
    assert f"if its trainer, process {training.process.pid}, died now" in " ".join(alive.split())
    training.kill()
    wait_for(lambda: [e for e in read_events(run / "events.jsonl") if e["kind"] == "trainer-death"], "the agent's look")
    document = good("why", run, "--json").json
    assert document["chosen"] == "step-000000000008.l0002"
    assert document["memory"]["agent_pid"] == training.agent_pid
    assert document["memory"]["preferred"] is True
    assert document["memory"]["step"] > 8
    assert f"holds step {document['memory']['step']} in memory" in " ".join(good("why", run).out.split())
    training.kill_agent()
    assert good("why", run, "--json").json["memory"] is None
