"""`stepwell prove` says "identical" of what resumes rightly, and names what is wrong with what does not.

Every control is the same script with one thing changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.prove.commands import DEMO, SCRIPT, processes_in, prove, prove_script, trial_words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.soak
def test_the_demo_is_identical(tmp_path: Path) -> None:
    outcome = prove(tmp_path / "out", sys.executable, DEMO, kills=2)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert "identical: after 2 kills" in outcome.stdout
    assert outcome.document["compared"]["tensors"] > 40
    assert outcome.document["logged"]["steps"] > 300
    assert {kill["victim"] for kill in outcome.document["kills"]} == {"trainer", "trainer and agent"}
    assert all(kill["source"] in ("memory", "disk") for kill in outcome.document["kills"])


@pytest.mark.soak
def test_four_kills_behind_a_wrapper_that_hides_the_exit_code_and_one_json_document(tmp_path: Path) -> None:
    # The wrapper would start a trainer of its own after each kill: prove has to end it with its trainer.
    wrapper = f"while ! {sys.executable} {SCRIPT}; do :; done; true"
    outcome = prove(tmp_path / "out", "bash", "-c", wrapper, kills=4, as_json=True)
    document = json.loads(outcome.stdout)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert document["verdict"] == "identical"
    victims = [kill["victim"] for kill in document["kills"]]
    assert sorted(victims) == ["trainer", "trainer", "trainer and agent", "trainer and agent"]
    for kill in document["kills"]:
        assert 0 < kill["resumed"] <= kill["step"]
        assert kill["redone"] == kill["step"] - kill["resumed"] <= 2 * document["interval"]
        # Whoever took the agent along took the memory along.
        assert kill["victim"] == "trainer" or kill["source"] == "disk"
    assert "memory" in {kill["source"] for kill in document["kills"]}
    assert Path(document["timeline"]).stat().st_size > 10_000


@pytest.mark.soak
def test_restored_state_that_is_thrown_away_is_named(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "reinitialised")
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert outcome.document["first_difference"]["path"].startswith("model/")
    assert f"different: {outcome.document['first_difference']['path']} " in outcome.stdout
    (kill,) = outcome.document["kills"]
    assert outcome.document["logged"]["first"]["step"] == kill["resumed"] + 1
    assert f"in the attempt that resumed at step {kill['resumed']}" in outcome.stdout
    assert "untracked state" in outcome.document["causes"][0]


@pytest.mark.soak
def test_a_script_that_never_restores_fails_with_its_own_error(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "no-restore")
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert "failed: the script ended with exit status 1 after kill 1" in outcome.stdout
    assert "call ckpt.restore() before the loop" in outcome.stdout


def test_an_unseeded_augmentation_is_named(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "unseeded")
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert outcome.document["first_difference"]["path"].startswith("model/")
    assert outcome.document["logged"]["names"].keys() == {"loss"}
    assert "the runs diverge before the first kill" in outcome.stdout
    assert "an unseeded generator" in outcome.document["causes"][0]


@pytest.mark.soak
def test_an_average_changed_outside_every_guard_is_not_called_identical(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "outside-guard", STEPWELL_SLOW_COPY="0.002")
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert outcome.document["verdict"] == "unguarded"
    assert "average changed while the snapshot of step" in outcome.stdout
    assert {void["seen_by"] for void in outcome.document["voids"]} == {"verify_snapshots"}


@pytest.mark.soak
def test_control_without_the_hashes_the_torn_average_reaches_the_end(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "outside-guard", STEPWELL_SLOW_COPY="0.002", STEPWELL_VERIFY="0")
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert outcome.document["verdict"] == "different"
    differing = {item["path"] for item in outcome.document["differences"]}
    assert differing and all(path.endswith("/average") for path in differing)
    assert outcome.document["logged"]["first"] is None


@pytest.mark.soak
def test_a_script_that_saves_too_rarely_is_inconclusive(tmp_path: Path) -> None:
    outcome = prove_script(tmp_path / "out", "rarely")
    assert outcome.code == 3, outcome.stdout + outcome.stderr
    assert outcome.document["verdict"] == "inconclusive"
    assert "the first checkpoint was step 120 of 120" in outcome.stdout


def test_a_script_that_fails_by_itself_is_inconclusive(tmp_path: Path) -> None:
    outcome = prove(tmp_path / "out", "bash", "-c", "echo out of coffee; exit 7")
    assert outcome.code == 3
    assert "inconclusive: the script ended with exit status 7 without a kill" in outcome.stdout
    assert "  | out of coffee" in outcome.stdout


def test_a_command_without_a_run_is_inconclusive(tmp_path: Path) -> None:
    outcome = prove(tmp_path / "out", "true")
    assert outcome.code == 3
    assert "the script created no run" in outcome.stdout


def test_a_command_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    outcome = prove(tmp_path / "out", tmp_path / "nothing")
    assert outcome.code == 2
    assert "cannot start it" in outcome.stderr


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "killed").mkdir(parents=True)
    outcome = prove(out, "true")
    assert outcome.code == 2
    assert "is not empty" in outcome.stderr
    assert (out / "killed").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_trial_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    # A wrapper, a trainer that ignores what can be ignored, and one in a session of its own, as the agent is.
    command = ["bash", "-c", "setsid sleep 71 & trap '' INT TERM HUP; sleep 72; true"]
    with subprocess.Popen(trial_words(tmp_path / "out", command, kills=1, seed=1), stderr=subprocess.DEVNULL) as trial:
        assert _comes_true(lambda: len(processes_in(tmp_path / "out")) == 3)
        trial.send_signal(number)
        assert trial.wait(60) == 128 + number
    assert processes_in(tmp_path / "out") == []


def test_control_the_processes_of_a_trial_are_seen(tmp_path: Path) -> None:
    environment = {**os.environ, "STEPWELL_WHERE": str(tmp_path / "out" / "reference")}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        assert _comes_true(lambda: processes_in(tmp_path / "out") == [process.pid])
        process.kill()


def _comes_true(condition: object, seconds: float = 60.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
