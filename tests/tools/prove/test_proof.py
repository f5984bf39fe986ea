"""The verdict: "identical" only of a trial that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell.tools.prove.final_states import Difference, StateComparison, grouped
from stepwell.tools.prove.logged_values import LogComparison, LogDifference
from stepwell.tools.prove.proof import Failure, Kill, Proof, VoidTrial, as_document

KILL = Kill(1, 0.0, step=25, victim="trainer", resumed=20, source="memory", was_committed=True)
EQUAL = StateComparison(step=100, tensors=3, nbytes=12, values=7, differences=[])
SAME_LOGS = LogComparison(steps=100, values=100, repeated=105, lost=0, first=None, names={})
GOOD = Proof(
    asked=1, seed=0, steps=100, kills=[KILL], interval=10, states=EQUAL, logs=SAME_LOGS, lineage_steps={1: 0, 2: 20}
)


def with_differences(*paths: str) -> StateComparison:
    return replace(EQUAL, differences=[Difference(path, "differs", True) for path in paths])


def with_log_difference(step: int, lineage: int | None) -> LogComparison:
    return replace(SAME_LOGS, first=LogDifference(step, "loss", "1", "2", lineage), names={"loss": 1})


def test_a_good_trial_is_identical() -> None:
    assert (GOOD.verdict, GOOD.exit_code, GOOD.doubts, GOOD.notes, GOOD.causes) == ("identical", 0, [], [], [])


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"resumed": None, "source": None}, "did not start again"),
        ({"resumed": 0, "source": None}, "began from scratch"),
        ({"resumed": 0}, "resumed at step 0"),
        ({"was_committed": False}, "was never committed"),
        ({"step": 41}, "21 steps were redone, more than two intervals of 10"),
    ],
)
def test_a_restart_that_shows_nothing_is_inconclusive(change: dict[str, object], doubt: str) -> None:
    proof = replace(GOOD, kills=[replace(KILL, **change)])  # type: ignore[arg-type]
    assert (proof.verdict, proof.exit_code) == ("inconclusive", 3)
    assert doubt in proof.doubts[0]


def test_an_agent_that_was_killed_needs_no_restart() -> None:
    went_on = replace(KILL, number=2, victim="agent of rank 1", resumed=None, source=None, is_restart=False)
    assert replace(GOOD, asked=2, ranks=2, kills=[KILL, went_on]).verdict == "identical"


def test_what_was_set_for_many_ranks_is_said() -> None:
    assert replace(GOOD, set_for_it=["A=1"]).notes == []
    (note,) = replace(GOOD, ranks=2, set_for_it=["A=1"]).notes
    assert note.startswith("prove set A=1")


def test_two_intervals_may_be_redone() -> None:
    assert replace(GOOD, kills=[replace(KILL, step=40)]).verdict == "identical"


def test_fewer_kills_than_asked_are_inconclusive() -> None:
    proof = replace(GOOD, asked=2)
    assert proof.exit_code == 3
    assert proof.doubts == ["only 1 of 2 kills were possible: the run ended before the others"]


def test_an_obstacle_is_inconclusive() -> None:
    assert Proof(asked=1, seed=0, obstacle="no way").doubts == ["no way"]
    assert Proof(asked=0, seed=0).verdict == "inconclusive"


def test_a_difference_counts_even_where_a_restart_began_fresh() -> None:
    proof = replace(GOOD, kills=[replace(KILL, source=None)], states=with_differences("model/w"))
    assert (proof.verdict, proof.exit_code) == ("different", 1)


def test_different_logs_alone_are_a_difference() -> None:
    proof = replace(GOOD, logs=with_log_difference(21, 2))
    assert (proof.verdict, proof.differences) == ("different", [])


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_a_generator_that_nobody_seeded_is_a_note(name: str) -> None:
    proof = replace(GOOD, states=with_differences(f"stepwell/rng/{name}/1"))
    assert proof.verdict == "identical"
    assert f"{name}'s global generator was never seeded" in proof.notes[0]


@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_torchs_own_generators_are_a_difference(name: str) -> None:
    proof = replace(GOOD, states=with_differences(f"stepwell/rng/{name}"))
    assert proof.verdict == "different"
    assert any("torch.manual_seed" in cause for cause in proof.causes)


def test_an_unseeded_generator_beside_a_difference_is_a_cause_and_not_the_first_difference() -> None:
    proof = replace(GOOD, states=with_differences("stepwell/rng/numpy/1", "model/w"))
    assert [item.path for item in proof.differences] == ["model/w"]
    assert any("numpy.random.seed" in cause for cause in proof.causes)
    only_logs = replace(GOOD, states=with_differences("stepwell/rng/numpy/1"), logs=with_log_difference(21, 2))
    assert [item.path for item in only_logs.differences] == ["stepwell/rng/numpy/1"]


def test_a_bucket_that_was_not_used_is_told() -> None:
    assert any("this proves nothing about the bucket" in note for note in replace(GOOD, bucket="s3://b/run").notes)


def test_where_the_runs_part_decides_which_cause_is_likelier() -> None:
    before = replace(GOOD, states=with_differences("model/w"), logs=with_log_difference(3, 1))
    assert before.place is not None and "before the first kill, at step 3" in before.place
    assert before.causes[0].startswith("an unseeded generator")
    after = replace(GOOD, states=with_differences("model/w"), logs=with_log_difference(21, 2))
    assert after.place == "at step 21, in the attempt that resumed at step 20"
    assert after.causes[0].startswith("untracked state")
    assert any("a batch drawn before" in cause for cause in after.causes) and not any(
        "a batch drawn before" in cause for cause in before.causes
    )
    missing = replace(GOOD, logs=with_log_difference(99, None))
    assert missing.place is None and missing.verdict == "different"


@pytest.mark.parametrize(
    ("seen_by", "verdict"),
    [("verify_snapshots", "unguarded"), ("version guard", "identical"), ("fingerprint of a frozen leaf", "identical")],
)
def test_a_voided_snapshot_is_told_and_fails_if_only_the_hashes_saw_it(seen_by: str, verdict: str) -> None:
    proof = replace(GOOD, voids=[VoidTrial("killed", 8, "ema/w", seen_by), VoidTrial("killed", 16, "ema/w", seen_by)])
    assert proof.verdict == verdict
    (note,) = proof.notes
    assert "snapshots voided: 2, first that of step 8 in killed/, because ema/w changed" in note
    different = replace(proof, states=with_differences("ema/w"))
    assert different.verdict == "different"
    assert "outside every guard" in different.causes[0]


def test_a_script_that_fails_after_a_kill_failed_and_before_one_shows_nothing() -> None:
    failure = Failure("killed", after=1, status=7, lines=["no"])
    assert replace(GOOD, states=None, logs=None, failure=failure).exit_code == 1
    early = replace(failure, run="reference", after=0)
    assert Proof(asked=1, seed=0, failure=early, obstacle="fails without any kill").exit_code == 3


def test_the_document_says_it_all() -> None:
    document = as_document(replace(GOOD, states=with_differences("model/w")))
    assert document["verdict"] == "different"
    assert document["first_difference"] == {"path": "model/w", "text": "differs", "is_tensor": True}
    assert document["kills"][0]["redone"] == 5
    assert as_document(Proof(asked=1, seed=0))["compared"] is None


def value(path: str, one: object, two: object) -> Difference:
    return Difference(path, f"is not the same (value): {one} uninterrupted, {two} killed", False)


def test_what_differs_is_listed_by_object_with_plain_values_first() -> None:
    """A schedule that lost a step: one line of it tells more than thirty weights."""
    tensors = [Difference(f"model/{n}", "differs in 1 of 4 elements", True) for n in range(30)]
    counts = [value("scheduler/last_epoch", 20, 19), value("scheduler/_step_count", 21, 20)]
    more = [value(f"scheduler/x/{n}", 1, 2) for n in range(3)]
    generator = Difference("stepwell/rng/torch", "differs in 9 of 9 elements", True)
    assert grouped([*tensors, generator, *counts, *more]) == [
        "scheduler/last_epoch 20 uninterrupted, 19 killed; scheduler/_step_count 21 uninterrupted, 20 killed; "
        "scheduler/x/0 1 uninterrupted, 2 killed; and 2 more of scheduler",
        "stepwell/rng/torch differs in 9 of 9 elements",
        "model/0 differs in 1 of 4 elements; and 29 more of model",
    ]
    assert grouped([value("stepwell/step", 100, 110), *counts, *tensors])[0].startswith("stepwell/step 100 ")
    assert grouped([Difference(f"net{n}/w", "differs", True) for n in range(9)])[-1] == "3 more objects"


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("scheduler/last_epoch", "a scheduler step"),
        ("stepwell/step", "repeated or skipped batches or epochs"),
        ("seen/0", "untracked state"),
    ],
)
def test_the_hint_that_fits_what_differs_comes_first(path: str, cause: str) -> None:
    states = replace(EQUAL, differences=[Difference("model/w", "differs", True), value(path, 20, 19)])
    assert replace(GOOD, states=states).causes[0].startswith(cause)
