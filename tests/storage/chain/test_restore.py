"""Restarts from a chain: which step, how near to the truth, and what is said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import stepwell
from stepwell.restore.from_chain import find_chains, why_broken
from stepwell.storage.chain.replay import read_document
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.main import main
from tests.storage.chain.walk import State, Woven, chained, crashed, distance, same, state_of, train
from tests.training.loop.small import Small

STEPS = 24
Walked = tuple[Small, dict[int, State], Path]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    """A run of some steps, the truth, and what is on disk after the last one."""
    folder = tmp_path_factory.mktemp("walked")
    run, left = chained(folder / "run"), folder / "left"
    truth = train(run, STEPS + 2, lambda step: crashed(run, left) if step == STEPS else None)
    yield run, truth, left
    run.ckpt.close(save=False)


@pytest.fixture
def left(walked: Walked, tmp_path: Path) -> Path:
    return crashed_again(walked[2], tmp_path / "left")


def crashed_again(source: Path, to: Path) -> Path:
    return Path(shutil.copytree(source, to))


def bases(where: Path) -> list[int]:
    return sorted({chain.base.step for chain in find_chains(RunPaths(where))})


def reopen(where: Path, prefer: str | None = None, *, step: int | None = None, before: int | None = None,
           **options: object) -> Small:  # fmt: skip
    run = chained(where, **options)
    assert run.ckpt.restore(prefer=prefer, step=step, before=before)
    return run


def test_every_step_is_in_a_record_or_a_base(walked: Walked) -> None:
    run, truth, _ = walked
    durable = {event["step"] for event in run.events("delta") + run.events("commit")}
    left_out = {event["step"] for event in run.events("delta-skipped")}
    first = run.events("delta")[0]["step"]
    assert first < STEPS // 2 and durable | left_out >= set(range(first, max(truth))), "all, once there is a chain"
    assert len(left_out) < STEPS // 4, "only while the first base is written"
    assert {event["sort"] for event in run.events("delta")} == {"delta", "skip"}


def test_the_newest_step_comes_back_near_to_the_truth(walked: Walked, left: Path) -> None:
    _, truth, _ = walked
    run = reopen(left, "newest")
    step = run.ckpt.status().step
    assert step == STEPS
    base = truth[bases(left)[-1]]
    assert distance(state_of(run), truth[step], base) < 0.3
    assert not same(state_of(run), truth[step])
    (event,) = run.events("lossy")
    assert event["step"] == step and event["codec"].startswith("lc(")
    assert run.events("restore")[-1]["source"] == "chain"
    run.ckpt.close(save=False)
    document = json.loads(CliRunner().invoke(main, ["ls", str(left), "--json"]).output)
    assert document["lossy_lineages"] == [2], "and it is never forgotten"


def test_what_is_not_quantised_comes_back_to_the_bit(walked: Walked, left: Path) -> None:
    """Counters, statistics and the place in the data: only parameters and moments may differ."""
    before, truth, _ = walked
    run = reopen(left, "newest")
    found, wanted = state_of(run), truth[STEPS]
    lossy = [name for name in found if not found[name].equal(wanted[name])]
    assert lossy and all(name.endswith(("weight", "bias", "exp_avg", "exp_avg_sq")) for name in lossy)
    for name in found:
        if name.endswith("exp_avg_sq"):
            assert bool((found[name] > 0).eq(wanted[name] > 0).all()), "no second moment becomes zero"
    assert sorted(train(run, 2)) == [STEPS + 1, STEPS + 2]
    assert before.seen[-2:] == run.seen[-2:], "the same next samples"
    run.ckpt.close(save=False)


def test_a_state_from_records_lies_as_it_lay(tmp_path: Path) -> None:
    """A fused step pairs the elements of parameter and moments as they follow each other in memory."""
    run, left = chained(tmp_path / "run", Woven), tmp_path / "left"
    train(run, 8, lambda step: crashed(run, left) if step == 7 else None)
    run.ckpt.close(save=False)
    other = chained(left, Woven)
    assert other.ckpt.restore(prefer="newest") and other.events("restore")[-1]["source"] == "chain"
    weight = other.model[2].weight
    lying = [value.stride() for value in other.optimizer.state[weight].values() if value.dim()]
    assert lying == [weight.stride()] * 2 and not weight.is_contiguous()
    other.ckpt.close(save=False)


def test_exact_is_exact(walked: Walked, left: Path) -> None:
    _, truth, _ = walked
    run = reopen(left, "exact")
    step = run.ckpt.status().step
    assert step == bases(left)[-1] and same(state_of(run), truth[step])
    (event,) = run.events("chain-left")
    assert (event["step"], event["restored"]) == (STEPS, step)
    assert not run.events("lossy")
    run.ckpt.close(save=False)
    assert json.loads(CliRunner().invoke(main, ["ls", str(left), "--json"]).output)["lossy_lineages"] == []


@pytest.mark.parametrize(("worth", "is_lossy"), [(0.0, True), (1e6, False)])
def test_unless_it_is_said_the_work_decides(worth: float, is_lossy: bool, left: Path) -> None:
    run = reopen(left, deltas=stepwell.Deltas(small="pool", worth=worth))
    assert run.ckpt.status().step == (STEPS if is_lossy else bases(left)[-1])
    run.ckpt.close(save=False)


def test_without_deltas_only_who_asks_gets_what_is_lossy(left: Path, tmp_path: Path) -> None:
    again = crashed_again(left, tmp_path / "again")
    run = reopen(left, deltas=None)
    assert run.ckpt.status().step == bases(left)[-1]
    run.ckpt.close(save=False)
    run = reopen(again, "newest", deltas=None)
    assert run.ckpt.status().step == STEPS
    run.ckpt.close(save=False)


def test_a_step_in_a_chain_can_be_named(walked: Walked, left: Path, tmp_path: Path) -> None:
    _, truth, _ = walked
    (chain, *_) = find_chains(RunPaths(left))
    step = chain.records[len(chain.records) // 2].step
    again = crashed_again(left, tmp_path / "again")
    run = reopen(left, step=step)
    assert run.ckpt.status().step == step
    assert distance(state_of(run), truth[step], truth[chain.base.step]) < 1.0
    run.ckpt.close(save=False)
    run = reopen(again, "newest", before=step)
    assert run.ckpt.status().step == max(step - 1, chain.base.step)
    run.ckpt.close(save=False)


def test_a_record_that_is_damaged_ends_the_chain_before_it(left: Path) -> None:
    (chain, *_) = find_chains(RunPaths(left))
    path = max((left / "chains" / chain.base.directory).glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    run = reopen(left, "newest")
    assert run.ckpt.status().step == STEPS - 1
    run.ckpt.close(save=False)


def test_sizes_are_not_believed_before_the_base_has_them(left: Path) -> None:
    """Nothing is allocated for a document that says more than there is; what is exact comes back."""
    for path in (left / "chains").glob("*/chain.json"):
        about = read_document(path.parent)
        first, *others = about.parts
        slot = replace(first.slots[0], leaf=replace(first.slots[0].leaf, shape=(1 << 44,)))
        path.write_bytes(replace(about, parts=(replace(first, slots=(slot, *first.slots[1:])), *others)).dump())
    problems = [why_broken(RunPaths(left), chain.base) for chain in find_chains(RunPaths(left))]
    assert problems and all("other leaves than its base" in str(problem) for problem in problems)
    run = reopen(left, "newest")
    assert run.ckpt.status().step == bases(left)[-1]
    run.ckpt.close(save=False)


def test_a_base_that_is_damaged_takes_its_chain_along(left: Path) -> None:
    chains = find_chains(RunPaths(left))
    path = left / chains[0].base.directory / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    older = max([chain.records[-1].step for chain in chains[1:]] + [0])
    run = chained(left)
    if older:
        assert run.ckpt.restore(prefer="newest") and run.ckpt.status().step == older
    else:
        with pytest.raises(stepwell.RestoreError):
            run.ckpt.restore(prefer="newest")
    run.ckpt.close(save=False)


def test_records_beyond_where_the_run_went_on_are_history_no_more(left: Path, tmp_path: Path) -> None:
    """The run goes on exactly from the base, so that the records after it are of an abandoned branch."""
    run = reopen(left, "exact")
    base = run.ckpt.status().step
    train(run, 8)
    assert run.ckpt.status().step < STEPS
    after = crashed(run, tmp_path / "after")
    run.ckpt.close(save=False)
    again = reopen(after, "newest")
    assert base < again.ckpt.status().step <= base + 8 < STEPS
    again.ckpt.close(save=False)


def test_after_a_lossy_restart_the_next_checkpoint_comes_at_once(left: Path) -> None:
    run = reopen(left, "newest", deltas=None)
    assert run.ckpt.status().committed_step is None
    run.train(stop_after=3)
    run.ckpt.wait(60)
    assert run.ckpt.status().committed_step is not None
    run.ckpt.close(save=False)


def test_a_preference_that_means_nothing(left: Path) -> None:
    run = chained(left)
    with pytest.raises(stepwell.ConfigError, match="'exact' or 'newest'"):
        run.ckpt.restore(prefer="fastest")
    run.ckpt.close(save=False)
