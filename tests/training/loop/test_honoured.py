"""A setting is honoured, refused, or named at the terminal."""

from __future__ import annotations

import logging
import math
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError
from stepwell.tools.prove import trial_facts
from stepwell.training.loop import options
from tests.training.loop.small import Small


@pytest.fixture(autouse=True)
def at_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")


def test_a_bucket_that_prove_replaces_by_a_directory_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STEPWELL_WHERE", str(run_dir))
    small = Small(run_dir)
    ckpt = stepwell.Checkpointer("s3://bucket/run", model=small.model)
    ckpt.restore()
    ckpt.close()
    assert "instead of the bucket s3://bucket/run" in caplog.text
    assert trial_facts.redirected([*small.events("start"), *small.events("redirected")]) == "s3://bucket/run"


def test_snapshots_on_a_device_without_a_device(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    Small(run_dir, {"snapshot": "device"}).train(1)
    assert caplog.text.count("snapshot='device' has no effect") == 1


@pytest.mark.parametrize("option", ["memory", "deltas"])
def test_too_little_memory_for_anything_between_checkpoints(
    option: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = stepwell.Every(steps=1) if option == "memory" else stepwell.LC(bits=3)
    small = Small(run_dir, {option: value, "host_memory": 1 << 14})
    for _ in small.ckpt.epochs(1000):  # until what memory there is has been made ready
        for batch in small.ckpt.data:
            small.update(batch)
        if f"{option}= has no effect" in caplog.text:
            small.ckpt.finish()
    assert caplog.text.count(f"{option}= has no effect") == 1


def test_deltas_on_a_device_without_a_device(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    Small(run_dir, {"deltas": stepwell.Deltas(device=True)}).train(2)
    assert "Quantising parameters on host" in caplog.text


def test_no_memory_at_all_is_named_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files holds for memory that is shared too."""
    small = Small(run_dir)
    small.ckpt.restore()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        small.train(2, stop_after=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    reasons = [event["reason"] for event in small.events("snapshot-skipped")]
    small.ckpt.close(save=False)
    assert sum("buffers are still being allocated" in record.message for record in caplog.records) <= 1, reasons
    assert "no memory for snapshots" in caplog.text


def test_a_notice_without_grace_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="notice= has no effect with grace=None"):
        Small(run_dir, {"notice": "/gone", "grace": None})


def test_a_switch_that_is_no_switch_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_VERIFY", "yes")
    with pytest.raises(ConfigError, match="STEPWELL_VERIFY='yes'"):
        Small(run_dir)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stepwell.Every(seconds=float("nan")),
        lambda: stepwell.Every(steps=1.5),  # type: ignore[arg-type]
        lambda: stepwell.Shared(every=1.5),  # type: ignore[arg-type]
        lambda: stepwell.Deltas(small="some"),  # type: ignore[arg-type]
        lambda: stepwell.Deltas(worth=float("nan")),
        lambda: stepwell.Checkpointer("/gone", state=[], on_unseekable="replay"),
        lambda: stepwell.Checkpointer("/gone", state=[], notice=""),
        lambda: stepwell.Checkpointer("/gone", state=[], host_memory=True),
    ],
)
def test_a_value_that_could_have_no_effect_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_a_duration_that_is_none_is_refused(seconds: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_CLOSE_SECONDS", seconds)
    with pytest.raises(ConfigError, match="STEPWELL_CLOSE_SECONDS"):
        Small(run_dir)


def test_a_variable_with_a_typo_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STEPWELL_CLOSE_SECOND", "5")
    monkeypatch.setenv("STEPWELL_BENCH_COMMIT", "not ours")
    Small(run_dir).train(1)
    assert caplog.text.count("has no effect; did you mean") == 1
    assert "The environment variable STEPWELL_CLOSE_SECOND has no effect" in caplog.text


def test_all_variables_that_the_library_reads_are_known() -> None:
    texts = [path.read_text() for path in Path(stepwell.__file__).parent.rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"STEPWELL_[A-Z_]*[A-Z]", text)}
    assert found == options.VARIABLES


@pytest.mark.parametrize("option", [{"keep": "x"}, {"keep": True}, {"seed": "x"}, {"seed": -1}, {"grace": math.inf}])
def test_values_that_make_no_sense(option: dict[str, Any], run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))}="):
        stepwell.Checkpointer(run_dir, model=torch.nn.Linear(1, 1), **option)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"overhed": 0.1}, "did you mean overhead=?"),
        ({"deltas": 3}, "give LC(bits=3)"),
        ({"deltas": True}, "give LC(bits=3)"),
        ({"network": torch.nn.Linear}, "network= is the class Linear"),
    ],
)
def test_wrong_settings_are_refused_at_once(options: dict[str, Any], what: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        stepwell.Checkpointer(run_dir, model=torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize("where", ["", None, 3])
def test_a_run_has_a_directory(where: Any) -> None:
    with pytest.raises(ConfigError, match="give the run's directory"):
        stepwell.Checkpointer(where, model=torch.nn.Linear(1, 1))


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        stepwell.Checkpointer(tmp_path / "file", model=torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"file/below/run: .*/file is a file; give the run another directory"):
        stepwell.Checkpointer(tmp_path / "file" / "below" / "run", model=torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("wishes", "what"),
    [
        ({"step": 7, "before": 3}, "step= and before= cannot be combined"),
        ({"step": "7"}, "step='7': give a number of steps"),
        ({"only": "modle"}, "only='modle': no such object is tracked; there is model"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wishes: dict[str, Any], what: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        Small(run_dir).ckpt.restore(**wishes)


@pytest.mark.parametrize("wishes", [{"step": 7}, {"before": 7}, {"step": 7, "only": "model"}])
def test_a_checkpoint_that_is_named_has_to_be_there(wishes: dict[str, Any], run_dir: Path) -> None:
    with pytest.raises(stepwell.RestoreError, match="has no checkpoint at all"):
        Small(run_dir).ckpt.restore(**wishes)


@pytest.mark.parametrize("count", ["5", -1, True])
def test_a_number_of_epochs_is_one(count: Any, run_dir: Path) -> None:
    small = Small(run_dir)
    with pytest.raises(ConfigError, match="give a number of epochs"):
        next(small.ckpt.epochs(count))
    small.ckpt.close()


def test_whether_there_is_data_can_be_asked(run_dir: Path) -> None:
    assert Small(run_dir).ckpt.data
    assert not stepwell.Checkpointer(run_dir, model=torch.nn.Linear(1, 1)).data
