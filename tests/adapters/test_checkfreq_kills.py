"""The five steps of CheckFreq's README as real processes: killed and started again, they end with the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from tests.adapters.scripts import Script
from tests.crash.harness import Server, wait_for
from tests.ranks.conftest import soak

SCRIPT = Path(__file__).parent / "train.py"
STEPS_OF_EPOCH = 11


def ledger(where: Path) -> list[str]:
    return Path(f"{where}.ledger").read_text().splitlines()


@pytest.fixture
def script(server: Server, run_dir: Path) -> Script:
    return Script(server, run_dir.parent, str(SCRIPT), str(run_dir))


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    folder = tmp_path_factory.mktemp("whole")
    script = Script(server, folder, str(SCRIPT), str(folder / "run"))
    assert script.run(CF_MODE="MANUAL") == 0, script.output
    lines = ledger(folder / "run")
    assert len(lines) == 3 * (STEPS_OF_EPOCH + 1)
    return script.last_line(), lines


def check_same_history(where: Path, wanted: list[str]) -> None:
    """Every step that was done, first or again, is a step of the uninterrupted run; and none is missing."""
    lines = ledger(where)
    assert [line for line in lines if line not in wanted] == []
    assert list(dict.fromkeys(lines)) == wanted


@pytest.mark.parametrize(
    ("mode", "agent_too", "workers"),
    [
        ("AUTO", "0", "2"),
        ("AUTO", "1", "0"),
        ("MANUAL", "0", "0"),
        ("MANUAL", "1", "2"),
        soak("AUTO", "0", "0"),
        soak("AUTO", "1", "2"),
        soak("MANUAL", "0", "2"),
        soak("MANUAL", "1", "0"),
    ],
)
def test_five_steps_killed_and_resumed(
    script: Script, run_dir: Path, uninterrupted: tuple[str, list[str]], mode: str, agent_too: str, workers: str
) -> None:
    weights, history = uninterrupted
    settings = {"CF_MODE": mode, "CF_FREQ": "3", "CF_KILL_AGENT": agent_too, "CF_WORKERS": workers}
    for kill in ("8", "19"):  # in the middle of epoch 0, and of epoch 1
        assert script.run(**settings, CF_KILL=kill) == -signal.SIGKILL, script.output
    assert script.run(**settings) == 0, script.output
    if workers == "0":  # what workers draw is not promised
        assert script.last_line() == weights
        check_same_history(run_dir, history)
    samples = dict.fromkeys(line.split("]")[0] for line in ledger(run_dir))
    assert list(samples) == [line.split("]")[0] for line in history], "the same samples in the same order, each once"
    steps = [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "restore"]
    # The last snapshots may not be there in AUTO mode, if steps are shorter than a write; an epoch's end always is.
    assert min(steps) >= 3 and max(steps) >= (17 if mode == "MANUAL" else STEPS_OF_EPOCH)


@pytest.mark.parametrize("kill", [f"{STEPS_OF_EPOCH},{STEPS_OF_EPOCH + 1}", str(2 * STEPS_OF_EPOCH)])
def test_killed_at_the_edge_of_an_epoch(
    script: Script, run_dir: Path, uninterrupted: tuple[str, list[str]], kill: str
) -> None:
    weights, history = uninterrupted
    while status := script.run(CF_MODE="MANUAL", CF_FREQ="1", CF_KILL=kill):
        assert status == -signal.SIGKILL, script.output
        kill = kill.partition(",")[2]
    assert script.last_line() == weights
    check_same_history(run_dir, history)


@pytest.mark.parametrize("chance", [0, soak(1), soak(2)])
def test_killed_from_outside_at_random_moments(
    server: Server, run_dir: Path, uninterrupted: tuple[str, list[str]], chance: int
) -> None:
    weights, history = uninterrupted
    draw = random.Random(chance)
    script = Script(server, run_dir.parent, str(SCRIPT), str(run_dir))
    kills = 0
    for _ in range(6):
        trainer = script.start(CF_MODE=draw.choice(["AUTO", "MANUAL"]), CF_FREQ=str(draw.randint(1, 4)))
        steps = count_lines(run_dir) + draw.randint(1, 12)
        wait_for(lambda: count_lines(run_dir) >= steps or trainer.has_ended(), "some steps")  # noqa: B023
        time.sleep(draw.random() * 0.03)  # anywhere within a step
        trainer.kill()
        kills += trainer.wait() == -signal.SIGKILL
    assert kills > 0
    assert script.run(CF_MODE="MANUAL", CF_FREQ="3") == 0, script.output
    assert script.last_line() == weights
    check_same_history(run_dir, history)


def count_lines(where: Path) -> int:
    path = Path(f"{where}.ledger")
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_control_the_script_without_its_position_ends_differently(
    server: Server, run_dir: Path, uninterrupted: tuple[str, list[str]]
) -> None:
    text = SCRIPT.read_text()
    broken = text.replace("cf_manager=cf_manager,", "cf_manager=None,")
    broken = broken.replace("cf_manager.weight_update()", "cf_manager.weight_update(); cf_manager.save()")
    assert broken.count("cf_manager=None,") == broken.count("cf_manager.save()") == 1
    path = run_dir.with_name("broken.py")
    path.write_text(broken)
    script = Script(server, run_dir.parent, str(path), str(run_dir))
    assert script.run(CF_MODE="MANUAL", CF_KILL="8") == -signal.SIGKILL, script.output
    assert script.run(CF_MODE="MANUAL") == 0, script.output
    assert script.last_line() != uninterrupted[0]
