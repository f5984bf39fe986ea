"""`prune`: retention by hand. Never the newest two good ones, never a named one, never a live run unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepwell.events.journal import read_events
from stepwell.storage.store import catalog, retention
from stepwell.storage.store.lineage import create_next
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep
from tests.tools.cli.commands import Training, flip, good, listing, stepwell, wait_for


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


LEFT = [
    "step-000000000006.l0001",  # named
    "step-000000000006.l0002",
    "step-000000000008.l0002",
    "step-000000000009.l0002",  # suspect: does not count, one is kept
]


def test_two_good_ones_stay(run: Path) -> None:
    answer = good("prune", run, "--keep", 2)
    assert names(run) == LEFT
    assert answer.out.splitlines()[-1].startswith("3 checkpoints removed, ")
    assert "abandoned branch" in answer.out
    good("verify", run)


def test_a_dry_run_removes_nothing(run: Path) -> None:
    before = listing(run)
    document = good("prune", run, "--keep", 2, "--dry-run", "--json").json
    assert listing(run) == before
    assert document["dry_run"] is True
    assert document["removed_bytes"] == 0
    assert [item["checkpoint"] for item in document["checkpoints"]] == [
        "step-000000000008.l0001",
        "step-000000000004.l0001",
        "step-000000000002.l0001",
    ]
    assert "3 checkpoints would go" in good("prune", run, "--keep", 2, "--dry-run").out


def test_every_and_more(run: Path) -> None:
    good("prune", run, "--keep", 3)
    assert "step-000000000004.l0001" in names(run)
    good("prune", run, "--keep", 2, "--every", 4)
    assert "step-000000000004.l0001" in names(run)
    assert good("prune", run, "--keep", 2).out.count("removed  ") == 1
    assert names(run) == LEFT
    assert good("prune", run, "--keep", 2).out.endswith(f"nothing to remove in {run}\n")


def told(run: Path, keep: Keep | None) -> None:
    """Continue the run once more, where it is, with another keep=; None: by an older version."""
    paths = RunPaths(run)
    create_next(paths, parent=2, step=9, keep=keep)


def test_what_the_run_keeps_stays(run: Path) -> None:
    """Control: with another keep= the same checkpoints go."""
    before = listing(run).keys()
    answer = good("prune", run)  # it was trained with keep=50
    assert answer.out.startswith("keeps the newest 50, as the run does\n")
    assert listing(run).keys() == before
    told(run, Keep(last=2, every=4, epochs=True))
    assert good("prune", run, "--dry-run").out.startswith(
        "keeps the newest 2, each step that is a multiple of 4 and the end of each epoch, as the run does\n"
    )
    good("prune", run)
    assert names(run) == sorted([*LEFT, "step-000000000004.l0001"])
    told(run, Keep())
    good("prune", run)
    assert names(run) == LEFT


def test_each_option_replaces_its_part_of_what_the_run_keeps(run: Path) -> None:
    told(run, Keep(last=3, every=4, epochs=True))

    def kept(*options: object) -> object:
        document = good("prune", run, "--dry-run", "--json", *options).json
        assert document["keep_of_run"] == {"last": 3, "every": 4, "epochs": True}
        return document["keep"]

    assert kept("--last", 5) == {"last": 5, "every": 4, "epochs": True}
    assert kept("--every", 7) == {"last": 3, "every": 7, "epochs": True}
    assert kept("--every", 0) == {"last": 3, "every": None, "epochs": True}
    assert kept("--no-epochs") == {"last": 3, "every": 4, "epochs": False}
    assert "; the run itself keeps the newest 3, each step" in good("prune", run, "--dry-run", "--keep", 2).out


def test_a_run_that_did_not_note_it_keeps_two_and_is_told_so(run: Path) -> None:
    told(run, None)
    answer = good("prune", run)
    assert answer.out.startswith("keeps the newest 2, the default: this run did not record its keep=")
    assert names(run) == LEFT


def test_json_says_what_went(run: Path) -> None:
    document = good("prune", run, "--keep", 2, "--json").json
    assert set(document) == {"run", "keep", "keep_of_run", "dry_run", "removed_bytes", "checkpoints"}
    assert all(item["removed"] and item["error"] is None for item in document["checkpoints"])
    assert document["removed_bytes"] == sum(item["nbytes"] for item in document["checkpoints"])


def test_it_is_in_the_event_log(run: Path) -> None:
    good("prune", run, "--keep", 2)
    pruned = [event for event in read_events(run / "events.jsonl") if event["kind"] == "prune"]
    assert [(event["who"], event["directory"]) for event in pruned[:1]] == [("cli", "step-000000000008.l0001")]


def test_one_checkpoint_is_not_enough_to_keep(run: Path) -> None:
    before = listing(run)
    answer = stepwell("prune", run, "--keep", 1)
    assert answer.code == 2
    assert "at least 2" in answer.err
    assert listing(run) == before


def test_damaged_ones_do_not_count_as_good(run: Path) -> None:
    """Truncated shards are seen, so 4 and 2 are the newest two good ones and stay.

    Control: judged by manifests alone, as an agent that just wrote them may, both would go.
    """
    for name in ("step-000000000008.l0002", "step-000000000006.l0002"):
        shard = run / name / "rank-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
    by_manifest = retention.surplus(catalog.scan(RunPaths(run)), Keep())
    assert {"step-000000000004.l0001", "step-000000000002.l0001"} <= {str(entry.id) for entry, _ in by_manifest}
    good("prune", run, "--keep", 2)
    assert names(run) == [
        "step-000000000002.l0001",
        "step-000000000004.l0001",
        "step-000000000006.l0001",
        "step-000000000009.l0002",
    ]


def test_a_named_one_stays_even_if_damaged(run: Path) -> None:
    flip(run / "step-000000000006.l0001" / "rank-00000.json", 50)
    good("prune", run, "--keep", 2)
    assert "step-000000000006.l0001" in names(run)


def test_a_live_run_is_refused(run: Path, start: Callable[..., Training]) -> None:
    training = start(run, "--until-file", run / "stop", "--restore-step", 8)
    before = listing(run)
    answer = stepwell("prune", run, "--keep", 2)
    assert (answer.code, answer.out) == (2, "")
    assert f"its trainer, process {training.process.pid}, is running" in answer.err
    assert listing(run).keys() == before.keys()
    good("prune", run, "--keep", 2, "--dry-run")  # looking is allowed
    good("prune", run, "--keep", 2, "--force")  # the control: what held it back is the trainer
    assert "step-000000000002.l0001" not in names(run)


def test_a_lingering_agent_holds_it_back_too(run: Path, start: Callable[..., Training]) -> None:
    training = start(run, "--until-file", run / "stop", "--restore-step", 8)
    training.kill()
    answer = stepwell("prune", run, "--keep", 2)
    assert answer.code == 2
    assert f"its agent, process {training.agent_pid}" in answer.err
    training.kill_agent()
    good("prune", run, "--keep", 2)


def test_what_cannot_be_removed_is_told(run: Path) -> None:
    (run / "step-000000000002.l0001" / "mine").mkdir()  # a directory: removing files does not remove it
    answer = stepwell("prune", run, "--keep", 2)
    assert answer.code == 1
    assert "could not remove  step-000000000002.l0001" in answer.out
    assert "2 checkpoints removed" in answer.out


def test_pruning_by_an_agent_and_listing_at_once(run: Path, start: Callable[..., Training]) -> None:
    """A live run prunes all the time: `ls`, `verify` and `why` see no damage in what goes away under them."""
    stop = run / "stop"
    training = start(run, "--until-file", stop, "--every-step", "--restore-step", 8)
    first = training.step()
    for _ in range(12):
        flags = [item["damage"] for item in good("ls", run, "--json").json["checkpoints"]]
        assert flags == [None] * len(flags)
        assert good("verify", run, "--json").json["whole"]
        assert good("why", run, "--json").json["chosen"] is not None
    wait_for(lambda: training.step() > first, "the run goes on")
    stop.touch()
    assert training.process.wait(60) == 0
