"""The writing side: options, what the agent is told, slots that are held, chains that end and begin again."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

import stepwell
from stepwell.agent.chainer import Chainer, _Open
from stepwell.agent.pending import AgentLayout, Pending
from stepwell.agent.queue import PendingQueue
from stepwell.events.journal import EventLog
from stepwell.handover.memory import PAGE, Arena, ArenaShape
from stepwell.handover.protocol import Begin
from stepwell.restore.from_chain import find_chains
from stepwell.storage.chain import chain_request
from stepwell.storage.chain.chain_files import list_chains
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.codecs.codec_spec import Raw
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.main import main
from stepwell.types import CheckpointId, Owner
from tests.agent.puppet import make_request
from tests.levels.peer_node import until
from tests.storage.chain.walk import Wide, chained, crashed, train, train_into_another_chain


def test_a_codec_alone_stands_for_the_defaults() -> None:
    codec = stepwell.LC(bits=2)
    assert stepwell.Deltas.of(codec) == stepwell.Deltas(parameters=codec)


@pytest.mark.parametrize(
    "deltas",
    [
        stepwell.Deltas(),
        stepwell.Deltas(parameters=stepwell.Ternary(0.7), first_moments=stepwell.Hold(), second_moments=Raw()),
        stepwell.Deltas(parameters=stepwell.Uniform(0.5), every=3, worth=1.5, small="pool", skip_every=0),
    ],
)
def test_what_the_agent_is_told_is_what_was_said(deltas: stepwell.Deltas) -> None:
    assert chain_request.load(json.loads(json.dumps(chain_request.dump(deltas)))) == deltas


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"memory": stepwell.Every(steps=1)}, "memory="),
        ({"levels": [stepwell.Node("/nowhere")]}, "levels="),
        ({"where": "s3://bucket/run"}, "bucket"),
    ],
)
def test_what_it_does_not_go_together_with(options: dict[str, Any], why: str, run_dir: Path) -> None:
    given = {"where": run_dir, "deltas": stepwell.LC(), "model": torch.nn.Linear(2, 2), **options}
    with pytest.raises(stepwell.ConfigError, match=why):
        stepwell.Checkpointer(given.pop("where"), **given)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.allocate(ArenaShape(1, 3, PAGE, 0))
    yield arena
    arena.close()


def pending(arena: Arena, sequence: int) -> Pending:
    begin = Begin(make_request(sequence, durable=False, delta=True), sequence, sequence - 1, 1, 1, 0)
    layout, id = AgentLayout(1, 100, 0, (), {}), CheckpointId(sequence, 0, 1)
    item = Pending("run", id, Owner(), arena, layout, begin)
    arena.set_sequence(item.slot, sequence)
    arena.set_verdict(item.slot, sequence, is_good=True)
    return item


def test_a_slot_that_is_being_read_is_not_given_back(arena: Arena) -> None:
    queue, first, second = PendingQueue(), pending(arena, 1), pending(arena, 2)
    queue.add(first)
    first.is_held = first.is_coded = True
    queue.add(second)
    assert queue.collect(None) == [] and queue.next_delta() is second
    first.is_held = False
    assert queue.collect(None) == [first]


def test_one_that_is_overtaken_is_left_out(arena: Arena) -> None:
    queue, items = PendingQueue(), [pending(arena, number) for number in (1, 2, 3)]
    for item in items:
        queue.add(item)
    assert queue.next_delta() is items[2]
    assert queue.collect(None) == items[:2], "the newest stays for a successor"


def test_a_snapshot_of_another_history_is_in_no_record(arena: Arena, run_dir: Path) -> None:
    """A successor went back and took the agent over, which still has what the dead trainer did later."""
    queue, lock, said = PendingQueue(), threading.Condition(), list[Any]()
    log = EventLog(Path(os.devnull), who="agent")
    chainer = Chainer(stepwell.Deltas(), RunPaths(run_dir), log, 2, lock=lock, queue=queue, say=said.append)
    chainer._chain = _Open(CheckpointId(2, 0, 2), cast("ChainWriter", None), [], 1)
    assert chainer._append(pending(arena, 3)) == [] == said


def test_records_every_few_steps(run_dir: Path) -> None:
    run = chained(run_dir, deltas=stepwell.Deltas(small="pool", every=3))
    until(lambda: run.train(1000, stop_after=20) or len(run.events("delta")) > 2)  # its base has to be durable first
    train_without_waiting(run, 1)
    steps = [event["step"] for event in run.events("delta")]
    assert all(later - step >= 3 for step, later in itertools.pairwise(steps))


def train_without_waiting(run: Wide, steps: int) -> None:
    run.train(1000, stop_after=steps)
    run.ckpt.wait(60)
    run.ckpt.close()


def test_a_policy_makes_bases_and_the_last_step_is_exact(run_dir: Path) -> None:
    run = chained(run_dir, policy=stepwell.Every(steps=10))
    truth = train(run, 45)
    run.ckpt.close()
    commits = [event["step"] for event in run.events("commit")]
    assert commits[-1] == max(truth) and len(commits) >= 4
    assert len(list_chains(RunPaths(run_dir))) <= 3, "older ones go when a new one begins"
    again = chained(run_dir)
    assert again.ckpt.restore(prefer="newest") and again.events("restore")[-1]["source"] == "disk"
    assert all(torch.equal(left, truth[max(truth)][f"model/{name}"]) for name, left in again.model.state_dict().items())
    again.ckpt.close(save=False)


def test_a_checkpoint_takes_its_chain_along(run_dir: Path) -> None:
    """`stepwell prune` here (forced: this process lives), and the agent's own: nothing is left without its base."""
    run = chained(run_dir, policy=stepwell.Every(steps=5), keep=4)
    train(run, 30)
    run.ckpt.close()
    assert CliRunner().invoke(main, ["prune", str(run_dir), "--keep", "2", "--force"]).exit_code == 0
    committed = {entry.id for entry in scan(RunPaths(run_dir)) if entry.is_committed}
    assert len(committed) == 2 and {id for id, _ in list_chains(RunPaths(run_dir))} <= committed
    assert len(list((run_dir / "chains").iterdir())) <= 2


def test_other_leaves_need_another_base(run_dir: Path) -> None:
    """A buffer appears in the middle of the run: the chain ends, and the next one has it."""
    run = chained(run_dir)
    train(run, 12)
    run.model.register_buffer("late", torch.zeros(5))
    train_into_another_chain(run)
    newest = find_chains(RunPaths(run_dir))[0]
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    again = chained(left)
    again.model.register_buffer("late", torch.ones(5))
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step >= newest.records[-1].step
    late = again.model.get_buffer("late")
    assert torch.equal(late, torch.zeros(5))
    again.ckpt.close(save=False)


def test_values_that_are_not_finite_are_in_no_record(run_dir: Path) -> None:
    run = chained(run_dir)
    train(run, 10)
    with torch.no_grad():
        next(run.model.parameters()).view(-1)[0] = float("nan")
    deadline = time.monotonic() + 60
    while not (skipped := [event for event in run.events("delta-skipped") if "non-finite" in event["reason"]]):
        assert time.monotonic() < deadline
        run.train(1000, stop_after=2)
        time.sleep(0.02)
    run.ckpt.close(save=False)
    assert skipped and max(event["step"] for event in run.events("delta")) < skipped[0]["step"]


def test_what_people_see(run_dir: Path) -> None:
    run = chained(run_dir)
    truth = train(run, 12)
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    shown = {name: CliRunner().invoke(main, [name, str(left)]) for name in ("ls", "why", "verify")}
    assert all(result.exit_code == 0 for result in shown.values()), shown
    document = json.loads(CliRunner().invoke(main, ["ls", str(left), "--json"]).output)
    step = document["chains"][0]["step"]
    assert step >= max(truth) - 1 and f"reach step {step} (lc(bits=3" in shown["ls"].output
    assert "prefer='newest'" in " ".join(shown["why"].output.split())
    path = max((left / "chains").glob("*/*.seg"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1  # not in the last record, where it could be the work of a crash
    path.write_bytes(data)
    broken = CliRunner().invoke(main, ["verify", str(left)])
    assert broken.exit_code == 1 and "record" in broken.output


def test_codecs_of_chains_can_be_exact(run_dir: Path) -> None:
    """`xor` for everything: a chain of all steps, to the bit."""
    exact = stepwell.Deltas.of(Raw())
    run = chained(run_dir, deltas=replace(exact, first_moments=Raw(), second_moments=Raw()))
    truth = train(run, 10)
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    again = chained(left)
    assert again.ckpt.restore(prefer="newest")
    found, step = again.model.state_dict(), again.ckpt.status().step
    assert step >= max(truth) - 1 and all(torch.equal(found[name], truth[step][f"model/{name}"]) for name in found)
    again.ckpt.close(save=False)
