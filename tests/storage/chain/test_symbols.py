"""Parameters that the trainer codes: every step is in a record, restores lead to the coder's own bits, and what goes
wrong costs the chain and nothing else. The coder stands for one on a GPU (`host_coder`; `tests/gpu` has the real one).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
from stepwell.errors import RoomError
from stepwell.handover.protocol import BaseWanted
from stepwell.restore.from_chain import find_chains
from stepwell.storage.codecs.coding_groups import AGAIN
from stepwell.storage.codecs.precoded import _kinds
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress
from stepwell.training.snapshot import coded as symbols
from stepwell.training.snapshot.arrange import Arranger
from stepwell.training.state.capture import Capture
from stepwell.training.state.tracked import track
from tests.crash.harness import Server, start_script, wait_for
from tests.levels.peer_node import until
from tests.ranks.conftest import soak
from tests.storage.chain.coded_trainer import HELD
from tests.storage.chain.host_coder import HostCoder, readers_state, use_host_coder
from tests.storage.chain.walk import State, Wide, base_step, crashed, state_of, train, train_into_another_chain

TRAINER = Path(__file__).with_name("coded_trainer.py")


@pytest.fixture
def coders(monkeypatch: pytest.MonkeyPatch) -> list[HostCoder]:
    return use_host_coder(monkeypatch)


@pytest.fixture
def run(run_dir: Path, coders: list[HostCoder]) -> Iterator[Wide]:
    found = coded(run_dir)
    yield found
    found.ckpt.close(save=False)


def coded(where: Path, deltas: stepwell.Deltas = HELD, **options: Any) -> Wide:
    return Wide(where, {"deltas": deltas, "policy": stepwell.Never(), **options})


def train_chained(run: Wide, steps: int) -> dict[int, State]:
    """So many steps after the first record. Returns the state after every step."""
    truth = train(run, 3)  # which saves the first of them, until there is a record
    until(lambda: truth.update(train(run, 3)) or run.events("delta"))
    return truth | train_settled(run, steps)


def train_settled(run: Wide, steps: int) -> dict[int, State]:
    """Until nothing older is under way, and so many steps after that: none of these has to be left out."""
    truth: dict[int, State] = {}
    until(lambda: truth.update(train(run, 1, is_chained=True)) or run.ckpt.status().delta_step == max(truth))
    return truth | train(run, steps, is_chained=True)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_records_lead_to_the_bits_of_the_coder(
    is_sparse: bool, run_dir: Path, coders: list[HostCoder], tmp_path: Path
) -> None:
    """And everything else of a record is exact, but for the moments, which are those of the base. Symbols come packed,
    or, of a code with few that are not zero, as marks and values.
    """
    run = coded(run_dir, replace(HELD, parameters=stepwell.LC(bits=2)) if is_sparse else HELD)
    known: dict[int, dict[str, np.ndarray]] = {}
    truth = train_chained(run, 1)
    truth |= train(run, 12, lambda step: known.update({step: readers_state(coders[0])}), is_chained=True)
    left = crashed(run, tmp_path / "left")
    assert len(coders) == 1 and (coders[0].sparse if is_sparse else coders[0].dense)
    run.ckpt.close(save=False)
    again = coded(left)
    assert again.ckpt.restore(prefer="newest")
    step, found = again.ckpt.status().step, state_of(again)
    assert step == max(truth) and [event["where"] for event in run.events("coding")] == ["cpu"]
    assert all(event["nbytes"] < 60_000 for event in run.events("snapshot")[-3:]), "without the parameters"
    for name, values in known[step].items():
        assert found[name].numpy().tobytes() == values.tobytes(), name
    base = truth[base_step(run.events("delta")[-1])]
    for name in set(found) - set(known[step]):
        expected = base if "exp_avg" in name else truth[step]
        assert torch.equal(found[name], expected[name]), name
    again.ckpt.close(save=False)


@pytest.mark.parametrize("bits", [3, 2])
def test_moments_may_be_coded_by_the_agent(bits: int, run_dir: Path, coders: list[HostCoder], tmp_path: Path) -> None:
    deltas = stepwell.Deltas(device=True, parameters=stepwell.LC(bits=bits))
    run = coded(run_dir, deltas)
    truth = train_chained(run, 10)
    again = coded(crashed(run, tmp_path / "left"), deltas)
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    moment = next(name for name in truth[max(truth)] if name.endswith("exp_avg_sq"))
    assert torch.allclose(state_of(again)[moment], truth[max(truth)][moment], rtol=0.1)
    for each in (run, again):
        each.ckpt.close(save=False)


def test_tables_are_made_anew_where_that_is_asked_for(run_dir: Path, coders: list[HostCoder]) -> None:
    run = coded(run_dir, replace(HELD, reuse_tables=False))
    train_chained(run, 3)
    assert AGAIN not in _kinds(coders[0].coded.heads)
    run.ckpt.close(save=False)


def test_a_new_base_is_read_from_its_slot(run: Wide, coders: list[HostCoder], tmp_path: Path) -> None:
    """Records go on against the old one until the agent has begun the next chain."""
    train_chained(run, 6)
    before = coders[0].bases
    run.ckpt.save().upload_completion.result(60)
    truth = train(run, 20, is_chained=True)
    chains = find_chains(RunPaths(run.where))
    assert coders[0].bases == before + 1 and len(chains) == 2 and all(chain.records for chain in chains)
    assert not run.events("chain-ended")
    again = coded(crashed(run, tmp_path / "left"))
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    again.ckpt.close(save=False)


def test_a_dead_agent_costs_the_chain(run: Wide, coders: list[HostCoder], tmp_path: Path) -> None:
    train_chained(run, 6)
    os.kill(run.ckpt.status().agent_pid, signal.SIGKILL)
    until(lambda: run.events("agent-death"))
    count = len(run.events("delta"))
    until(lambda: train(run, 3) and len(run.events("delta")) > count)
    truth = train_settled(run, 3)
    again = coded(crashed(run, tmp_path / "left"))
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    again.ckpt.close(save=False)


@pytest.mark.parametrize("seen_by", ["version guard", "verify_snapshots"])
def test_a_change_before_the_gate_voids_the_record_and_asks_for_a_base(
    seen_by: str, run_dir: Path, coders: list[HostCoder]
) -> None:
    """The coder has moved on: nothing may follow on what is not in the chain."""
    run = coded(run_dir, verify_snapshots=seen_by == "verify_snapshots")
    train_chained(run, 6)
    before = run.events("delta")[-1]["step"]

    def spoil(*_: object) -> None:
        if run.ckpt.status().step == now:
            return  # nothing is on its way
        until(lambda: coders[0].is_pending)
        handle.remove()
        weight = run.model[2].weight
        with torch.no_grad():
            (weight.data if seen_by == "verify_snapshots" else weight).add_(1)  # the first has a version of its own
        coders[0].may_finish.set()

    coders[0].may_finish.clear()  # the symbols are still on their way
    now, bases = run.ckpt.status().step, coders[0].bases
    handle = run.model[2].register_forward_pre_hook(spoil)
    until(lambda: train(run, 2) and any(event["step"] > now + 6 for event in run.events("delta")))
    voids = run.events("snapshot-void")
    assert [event["seen_by"] for event in voids] == [seen_by] and voids[0]["step"] > before
    after = {event["base"] for event in run.events("delta") if event["step"] > voids[0]["step"]}
    assert len(after) == 1 and coders[0].bases == bases + 1
    run.ckpt.close(save=False)


@pytest.mark.parametrize("size", [1500, 500_000], ids=["same arena", "larger one"])
def test_other_leaves_need_another_base(size: int, run: Wide, coders: list[HostCoder]) -> None:
    """The old arena takes its bases along, and the agent has a chain yet: only the trainer knows that it is over."""
    train_chained(run, 6)
    run.optimizer.add_param_group({"params": [extra := torch.nn.Parameter(torch.ones(size))]})
    run.model.register_parameter("extra", extra)
    extra.grad = torch.ones(size)
    train_into_another_chain(run, is_told=False)
    assert len(coders) == 2 and "model/extra" in readers_state(coders[1])


@pytest.mark.parametrize("is_partial", [False, True])
def test_of_what_goes_beside_only_parameters_make_a_record_suspect(is_partial: bool) -> None:
    """As of the whole state: what an optimizer has may be infinite. Without any parameter it is all there is to see."""
    model = torch.nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    tracked = track({"model": model, "optimizer": optimizer})
    flat = Capture(tracked).flatten({})
    kept = [leaf for leaf in flat.leaves if leaf.name.startswith("optimizer/")]
    arranger = Arranger(tracked, lambda: 1, is_partial=is_partial)
    plan = arranger.arrange(replace(flat, leaves=kept, fixed_count=0)).plan
    assert bool(plan.checked) is not is_partial


class Changing:
    """Its tensor has another shape at every step."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.count += 1
        return {"values": torch.zeros(self.count % 7)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass


def test_a_base_that_came_to_no_record_is_not_asked_for_at_once_again(run_dir: Path, coders: list[HostCoder]) -> None:
    """Else every second step would be a checkpoint."""
    run = coded(run_dir, changing=Changing())
    train(run, 30)
    assert any("changed" in event["reason"] for event in run.events("delta-skipped"))
    assert len(run.events("commit")) < 5
    run.ckpt.close(save=False)


def test_leaves_that_are_not_at_rest_any_more_are_left_to_the_host(run: Wide, coders: list[HostCoder]) -> None:
    """With the same names, types and shapes: the layout does not tell."""
    train_chained(run, 6)
    with torch.no_grad():
        weight = run.model[2].weight
        weight.data = weight.t().contiguous().t()
    train_into_another_chain(run, is_told=False)
    assert [event["where"] for event in run.events("coding")] == ["cpu", "host"]
    assert "has gaps" in run.events("coding")[-1]["reason"] and not run.events("snapshot-void")


def test_values_that_cannot_be_coded_end_the_chain(run: Wide, coders: list[HostCoder], tmp_path: Path) -> None:
    truth = train_chained(run, 6)
    with torch.no_grad():
        run.model[2].weight[0, 0] = float("nan")
    train(run, 2, is_chained=True)
    until(lambda: run.events("chain-ended"))
    assert "non-finite" in run.events("chain-ended")[0]["reason"]
    again = coded(crashed(run, tmp_path / "left"))
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    again.ckpt.close(save=False)


def test_records_wait_where_snapshots_do(run_dir: Path, coders: list[HostCoder]) -> None:
    """What changes parameters unseen by hooks and versions is safe with that."""
    run = coded(run_dir, snapshot="blocking")
    train_chained(run, 3)
    assert {event["strategy"] for event in run.events("snapshot")} == {"blocking"}
    run.ckpt.close(save=False)


def test_where_saves_are_streamed_no_base_is_asked_for(run_dir: Path, coders: list[HostCoder]) -> None:
    """A streamed one is never in memory as a whole: each would cost a stop of training, and lead to no chain."""
    run = coded(run_dir, host_memory=500_000)
    train(run, 3)
    run.ckpt._outcomes.collect()
    run.ckpt._outcomes.again.clear()
    run.ckpt._outcomes.on_agent(BaseWanted("there is no base yet"))
    run.ckpt._outcomes.collect()
    assert not run.ckpt._outcomes.again
    assert "saves stream" in run.events("delta-skipped")[-1]["reason"]
    run.ckpt.close(save=False)


def test_with_one_slot_the_host_codes(run_dir: Path, coders: list[HostCoder]) -> None:
    """A base that is held in it would leave no room for the record that reads it, nor for any checkpoint."""
    run = coded(run_dir, host_memory=2_000_000)
    for _ in range(3):
        train(run, 2)
        run.ckpt.save().upload_completion.result(60)
    assert [event["slots"] for event in run.events("arena")] == [1]
    assert [event["where"] for event in run.events("coding")] == ["host"] and not coders
    run.ckpt.close()


@pytest.mark.parametrize("why", ["room", "place", "compiler"])
def test_without_a_device_the_host_codes(
    why: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And says so."""
    if why == "room":
        use_host_coder(monkeypatch)

        def refuse(*_: object) -> None:
            raise RoomError("the device has no memory for a copy of 4 bytes")

        monkeypatch.setattr(symbols, "make_coder", refuse)
    if why == "compiler":
        use_host_coder(monkeypatch)

        def fail(*_: object, **__: object) -> None:
            raise subprocess.CalledProcessError(1, "gcc")  # as Triton does at the first use of a kernel

        monkeypatch.setattr(HostCoder, "encode", fail)
    run = coded(run_dir)
    train(run, 3)
    until(lambda: train(run, 1) and run.events("delta"))
    assert run.events("coding")[-1]["where"] == "host"
    assert {"room": "no memory", "place": "on cpu", "compiler": "gcc"}[why] in run.events("coding")[-1]["reason"]
    again = coded(crashed(run, tmp_path / "left"))
    told = again.events("delta")[-1]["step"]
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step >= told > 2
    for each in (run, again):
        each.ckpt.close(save=False)


@pytest.mark.parametrize("with_agent", [False, True], ids=["trainer", "both"])
def test_a_kill_loses_at_most_what_was_on_its_way(
    with_agent: bool, server: Server, run_dir: Path, coders: list[HostCoder]
) -> None:
    """The agent of a dead trainer appends what lies whole in memory, and offers none of it as a state."""
    kill_and_go_on(server, run_dir, lambda log: len(told(log, "delta")) > 20, with_agent=with_agent)


@pytest.mark.parametrize(
    "point",
    [
        "chain.writing:0:3",
        *(soak(each) for each in ("chain.base:0:2", "chain.started:0:2", "chain.begin:0:3", "chain.appended:0:3")),
    ],
)
def test_an_agent_that_is_killed_at_a_point_costs_its_chain_alone(
    point: str, server: Server, run_dir: Path, tmp_path: Path, coders: list[HostCoder]
) -> None:
    """The next one has no chain of what the trainer codes: it asks for a base, and records go on from there."""

    def is_past(log: Path) -> bool:
        """Some records after the death."""
        deaths = [event["time"] for event in told(log, "agent-death")]
        return bool(deaths) and sum(event["time"] > deaths[0] for event in told(log, "delta")) > 5

    crash = {"STEPWELL_CRASH": f"agent!{point}", "STEPWELL_CRASH_MARK": str(tmp_path / "mark")}
    kill_and_go_on(server, run_dir, is_past, with_agent=True, **crash)
    assert (tmp_path / "mark").exists()


def kill_and_go_on(
    server: Server, run_dir: Path, is_time: Callable[[Path], bool], *, with_agent: bool, **environment: str
) -> None:
    """A run of its own is killed when it is time; the next one goes on from the newest record."""
    paths, log = RunPaths(run_dir), run_dir / "events.jsonl"
    trainer = start_script(server, TRAINER, run_dir, log=run_dir.with_suffix(".log"), **environment)
    try:
        wait_for(lambda: is_time(log), "records")
        done = read_progress(paths.progress)
        assert done is not None
        if with_agent:
            os.kill(done.agent_pid, signal.SIGKILL)
    finally:
        trainer.kill()
        trainer.wait()
    done = read_progress(paths.progress)
    again = coded(run_dir)
    assert again.ckpt.restore(prefer="newest") and done is not None
    found = told(log, "restore")[0]
    assert found["source"] == "chain" and again.ckpt.status().step >= done.step - 2
    train(again, 3)
    again.ckpt.close(save=False)
    until(lambda: not Path(f"/proc/{done.agent_pid}").exists())


def told(log: Path, kind: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [event for event in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if event["kind"] == kind]
