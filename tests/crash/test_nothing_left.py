"""However a run ends, nothing is left behind: no process, no socket, no memory, and after the next start no file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.crash.harness import Ending, Run, has_socket, wait_for
from tests.crash.scenes import check_no_snapshot_lost


@pytest.mark.parametrize(
    ("how", "status"), [("exception", 1), ("exit", 3), ("_exit", 4), ("SIGTERM", -15), ("SIGINT", -2), ("SIGKILL", -9)]
)
def test_no_process_and_no_socket_and_no_memory(how: str, status: int, run: Run, reference: Ending) -> None:
    trainer = run.start(TRAIN_END="wait" if how.startswith("SIG") else how, STEPWELL_LINGER="0.2")
    if how.startswith("SIG"):
        run.wait_paused()
        agent = run.agent()
        assert has_socket(agent.pid), "the check can see the socket of a live agent"
        agent.close()
        assert arenas_of(run), "the check can see the arena of a live agent"
        trainer.signal(getattr(signal, how))
    assert trainer.wait() == status, trainer.log()
    if how in ("exception", "exit"):
        assert not run.events("trainer-death")  # it left through its own end: nobody lingers
    run.wait_gone(20)
    run.check_no_sockets()
    assert not arenas_of(run)
    step = run.check_newest()
    check_no_snapshot_lost(run)
    run.finish()
    began = run.opening(run.trainers[-1])
    assert began is not None and began["step"] >= step and began["source"] == "disk"
    run.check_identical(reference)
    run.check_nothing_left()


def arenas_of(run: Run) -> set[str]:
    """Arenas held by the processes of this run."""
    pids = [agent.pid for agent in run.agents()]
    found = set()
    for pid in pids + [trainer.pid for trainer in run.trainers]:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split()[4] for line in maps if "memfd:stepwell" in line}
    return found


def test_everything_dies_in_the_middle_of_a_write(run: Run, tmp_path: Path, reference: Ending) -> None:
    """Temporary files of the dead are gone after the next start."""
    mark = tmp_path / "mark"
    trainer = run.start(STEPWELL_CRASH="agent!manifest.written:0:3:stop", STEPWELL_CRASH_MARK=str(mark))
    wait_for(lambda: [agent for agent in run.agents() if agent.is_stopped()], "in the middle")
    trainer.kill()
    trainer.wait()
    assert run.kill_agents() == 1
    assert list(run.paths.root.rglob("*.tmp")), "there is something to clean"
    (run.paths.root / "run.json.99999.tmp").write_bytes(b"of a trainer that died while it opened the run")
    (run.paths.lineages / "0001.json.99999.tmp").write_bytes(b"the same")
    run.finish()
    run.check_identical(reference)
    run.check_nothing_left()


def test_a_finished_run_is_swept_too(run: Run, reference: Ending) -> None:
    """It commits nothing any more, and still cleans up at its start."""
    assert run.start().wait() == 0
    newest = run.newest()
    assert newest is not None
    (newest.path / "manifest.json.99999.tmp").write_bytes(b"of an agent that died right after its commit")
    left = run.paths.root / "step-000000000044.l0001"
    left.mkdir(exist_ok=True)
    (left / "manifest.json").unlink(missing_ok=True)  # as after a death in the middle of a prune
    (left / "rank-00000.safetensors.tmp").write_bytes(b"half")
    run.finish()
    run.check_identical(reference)
    run.check_nothing_left()


def test_the_agent_never_sees_the_users_script(run: Run) -> None:
    trainer = run.start(TRAIN_END="wait")
    agent = run.agent()
    run.wait_paused()
    maps = Path(f"/proc/{agent.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{trainer.pid}/maps").read_text()  # the check can see it
    assert "torch" not in maps and "numpy" not in maps
    command = Path(f"/proc/{agent.pid}/cmdline").read_bytes()
    assert b"trainer.py" not in command and b"-I" in command.split(b"\0")
    agent.close()
    trainer.kill()
    trainer.wait()
