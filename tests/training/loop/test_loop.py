"""The loop: what counts as a step, where a resume goes on, and how a run ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import ConfigError, DataError, Every, Keep, Never
from stepwell.events.journal import read_events
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Server, start_script
from tests.ranks.conftest import soak
from tests.training.loop.small import Small, same


def committed(where: Path) -> list[str]:
    return sorted(str(entry.id) for entry in scan(RunPaths(where)) if entry.is_good)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Small:
    run = Small(tmp_path_factory.mktemp("straight") / "run")
    assert run.ckpt.restore() is False
    run.train(3)
    return run


@pytest.mark.parametrize("stop_after", [at if at in (1, 5, 6, 7, 12, 17) else soak(at) for at in range(1, 18)])
def test_resume_after_every_batch(stop_after: int, run_dir: Path, straight: Small) -> None:
    """Left by break and closed: the next process sees exactly the rest, and ends with the same bits."""
    first = Small(run_dir)
    first.ckpt.restore()
    first.train(3, stop_after=stop_after)
    first.ckpt.close()
    torch.manual_seed(99)
    second = Small(run_dir, seed=5)
    assert second.ckpt.restore() is True
    second.train(3)
    assert first.seen + second.seen == straight.seen
    assert same(second.parameters(), straight.parameters())


def test_every_epoch_sees_every_sample_once_and_in_its_own_order(straight: Small) -> None:
    epochs = [[i for epoch, batch in straight.seen if epoch == number for i in batch] for number in range(3)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_skipped_batches_are_not_read(run_dir: Path) -> None:
    first = Small(run_dir)
    first.ckpt.restore()
    first.train(1, stop_after=5)
    first.ckpt.close()
    second = Small(run_dir)
    second.ckpt.restore()
    second.train(1)
    assert len(second.numbers.read) == 4


def test_finished_run_yields_no_epoch_and_says_so(run_dir: Path) -> None:
    Small(run_dir).train(1)
    again = Small(run_dir)
    assert again.ckpt.restore()
    again.train(1)
    assert again.seen == []
    assert [event["again"] for event in again.events("finished")] == [False, True]


def test_finished_run_goes_on_with_more_epochs(run_dir: Path, straight: Small) -> None:
    Small(run_dir).train(1)
    more = Small(run_dir)
    more.ckpt.restore()
    more.train(3)
    assert [epoch for epoch, _ in more.seen] == [1] * 6 + [2] * 6
    assert same(more.parameters(), straight.parameters())


def test_epoch_edge_runs_the_code_after_the_loop_again(server: Server, run_dir: Path) -> None:
    """Killed between the last batch's checkpoint and the code after the loop: that code runs on resume."""
    script = run_dir.with_name("train.py")
    script.write_text("""
import os, signal, sys
from pathlib import Path
from tests.training.loop.small import Small
import stepwell
run = Small(Path(sys.argv[1]), {"policy": stepwell.Every(epochs=1)})
run.ckpt.restore()
after = []
for epoch in run.ckpt.epochs(2):
    for number, batch in enumerate(run.ckpt.data):
        if number:
            run.wait_for_memory()  # three steps are over before it is ready, and the checkpoint would be put off
        run.update(batch)
    after.append(epoch)
    if len(sys.argv) > 2:
        run.ckpt.wait()
        os.kill(os.getpid(), signal.SIGKILL)
print("after", after, "batches", len(run.numbers.read) // 4)
""")
    log = run_dir.with_name("log")
    assert start_script(server, script, run_dir, "kill", log=log, STEPWELL_LINGER="0").wait() == -9
    assert start_script(server, script, run_dir, log=log, STEPWELL_LINGER="0").wait() == 0, log.read_text()
    assert "after [0, 1] batches 6" in log.read_text()


def test_close_after_break_before_the_step_keeps_the_batch_for_later(run_dir: Path) -> None:
    first = Small(run_dir)
    first.ckpt.restore()
    for _ in first.ckpt.epochs(1):
        for number, batch in enumerate(first.ckpt.data):
            if number == 3:
                break
            first.update(batch)
        break
    first.ckpt.close()
    second = Small(run_dir)
    second.ckpt.restore()
    second.train(1)
    assert len(second.seen) == 3


def test_islice_counts_what_was_consumed(run_dir: Path) -> None:
    first = Small(run_dir)
    first.ckpt.restore()
    for batch in itertools.islice(first.ckpt.data, 4):
        first.update(batch)
    first.ckpt.close()
    assert committed(run_dir)[-1].startswith("step-000000000004")


def test_several_optimizer_calls_in_an_iteration_are_one_step(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never()})
    run.ckpt.restore()
    for batch in itertools.islice(run.ckpt.data, 3):
        for _ in range(4):
            run.update(batch)
    run.ckpt.close()
    assert run.ckpt.status().step == 3


def test_accumulation_is_no_step(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Every(steps=1)})
    run.ckpt.restore()
    for number, batch in enumerate(run.ckpt.data):
        run.model(batch).mean().backward()
        if number % 3 == 2:
            run.optimizer.step()
    run.ckpt.close()
    assert run.ckpt.status().step == 2


def test_without_tracked_optimizer_each_batch_is_a_step(run_dir: Path) -> None:
    batches = [torch.zeros(1)] * 5
    ckpt = stepwell.Checkpointer(run_dir, data=batches, track={"values": {"a": 1}}, policy=Never())
    for _ in ckpt.data:
        pass
    ckpt.close()
    assert ckpt.status().step == 5


def test_optimizer_steps_without_trigger_warn_and_name_the_fix(run_dir: Path) -> None:
    run = Small(run_dir)
    with pytest.warns(UserWarning, match=r"Iterate `ckpt\.data` instead of the loader"):
        for _ in range(30):
            run.update(torch.zeros(4, 8))


def test_exception_leaves_the_last_good_checkpoint_and_no_process(run_dir: Path) -> None:
    run = Small(run_dir)
    with pytest.raises(RuntimeError, match="boom"), run.ckpt as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.data):
            run.update(batch)
            if number == 0:
                ckpt.save()  # waits for memory: an automatic one would be put off, and five steps may be over before
            if number == 4:
                raise RuntimeError("boom")
    assert committed(run_dir)[-1].startswith(f"step-{run.events('snapshot')[-1]['step']:012d}")
    assert not Path(f"/proc/{run.ckpt.status().agent_pid}").exists()


def test_interpreter_exit_without_close_leaves_no_process(run_dir: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.training.loop.small import Small
run = Small(Path({str(run_dir)!r}))
run.ckpt.restore()
for number, batch in enumerate(run.ckpt.data):
    run.update(batch)
    if number == 4:
        print(run.ckpt.status().agent_pid)
        raise SystemExit(3)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert not Path(f"/proc/{int(result.stdout)}").exists()
    complete = [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "snapshot"]
    assert committed(run_dir)[-1].startswith(f"step-{complete[-1]:012d}")


def test_constructor_touches_nothing(run_dir: Path) -> None:
    Small(run_dir)
    assert not run_dir.exists()


def test_forgotten_restore_is_refused(run_dir: Path) -> None:
    Small(run_dir).train(1)
    with pytest.raises(ConfigError, match=r"call ckpt\.restore\(\)"):
        Small(run_dir).train(1)


@pytest.mark.parametrize("name", ["policy", "keep", "seed", "host_memory", "snapshot", "track"])
def test_tracked_name_that_is_an_option(name: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name}= is an option.*track="):
        stepwell.Checkpointer(run_dir, **{name: torch.nn.Linear(2, 2)})
    tracked = {name: torch.nn.Linear(2, 2)}
    stepwell.Checkpointer(run_dir, track=tracked)


def test_option_errors_say_what_to_do(run_dir: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="nothing to save"):
        stepwell.Checkpointer(run_dir)
    with pytest.raises(ConfigError, match="both as a keyword and in track="):
        stepwell.Checkpointer(run_dir, model=model, track={"model": model})
    with pytest.raises(ConfigError, match="no state_dict"):
        stepwell.Checkpointer(run_dir, model=3)
    with pytest.raises(ConfigError, match="at least 2"):
        stepwell.Checkpointer(run_dir, model=model, keep=1)
    with pytest.raises(ConfigError, match="at least one of"):
        Every()
    with pytest.raises(ConfigError, match="auto, device, overlap, blocking"):
        stepwell.Checkpointer(run_dir, model=model, snapshot="fast")
    with pytest.raises(ConfigError, match="give a directory"):
        stepwell.Checkpointer("ftp://bucket/run", model=model)
    with pytest.raises(DataError, match=r"no data="):
        next(iter(stepwell.Checkpointer(run_dir, model=model).data))


def test_retention(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Every(steps=1), "keep": Keep(last=2, every=5, epochs=True)})
    run.ckpt.restore()
    run.ckpt.save().wait()  # memory is there: from now on no automatic save is put off for it
    for batch in itertools.islice(run.ckpt.data, 3):
        run.update(batch)
        run.ckpt.wait()
    run.ckpt.save(name="best").wait()
    for _ in run.ckpt.epochs(2):
        for batch in run.ckpt.data:
            run.ckpt.wait()  # storage keeps up
            run.update(batch)
    kept = committed(run_dir)
    # multiples of 5 (0 is one), the named one, both epoch ends (6 and 12), the newest two: 12 and its repeat
    assert kept == [
        "step-000000000000.l0001",
        "step-000000000003.l0001",
        "step-000000000005.l0001",
        "step-000000000006.l0001",
        "step-000000000010.l0001",
        "step-000000000012.l0001",
        "step-000000000012.l0001.r1",
    ]


def test_attached_files_are_stored_and_checked(run_dir: Path, tmp_path: Path) -> None:
    note = tmp_path / "note.bin"
    note.write_bytes(os.urandom(5_000_000))
    run = Small(run_dir, {"policy": Never()})
    run.ckpt.restore()
    directory = run.ckpt.save(files={"note.bin": note}).wait()
    stored = run_dir / directory / "rank-00000.file.note.bin"
    assert stored.read_bytes() == note.read_bytes()
    run.ckpt.close(save=False)
    with stored.open("r+b") as file:
        file.seek(4_500_000)
        file.write(b"x")
    again = Small(run_dir)
    with pytest.raises(stepwell.RestoreError, match=r"rank-00000\.file\.note\.bin"):
        again.ckpt.restore()


def test_log_lines_carry_the_step_they_belong_to(run_dir: Path) -> None:
    run = Small(run_dir)
    run.ckpt.restore()
    for batch in itertools.islice(run.ckpt.data, 3):
        run.update(batch)
        run.ckpt.log(loss=batch.mean(), note="x")
    run.ckpt.close()
    assert [event["step"] for event in run.events("log")] == [1, 2, 3]
    assert all(isinstance(event["values"]["loss"], float) for event in run.events("log"))


def test_save_handle(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never()})
    run.ckpt.restore()
    handle = run.ckpt.save()
    assert handle.staging_completion.result(30) is None
    assert handle.upload_completion.result(30) == "step-000000000000.l0001"
    assert run.ckpt.save().wait(30) == "step-000000000000.l0001.r1"
    run.ckpt.close(save=False)
