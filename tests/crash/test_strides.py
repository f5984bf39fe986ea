"""A fused optimizer over transposed parameters: killed and restarted from memory and from disk, to the same bits."""

from __future__ import annotations

import signal

from tests.crash.conftest import MakeRun
from tests.crash.harness import wait_for

FUSED = {"TRAIN_FUSED": "1", "TRAIN_IN_MEMORY": "1"}


def test_from_memory_and_from_disk(make_run: MakeRun) -> None:
    straight, run = make_run("straight", **FUSED), make_run(**FUSED)
    straight.finish()
    for nth in (7, 9):
        assert run.start(STEPWELL_CRASH=f"trainer!copy.complete:0:{nth}").wait() == -signal.SIGKILL
    wait_for(lambda: run.events("commit"), "something is on disk")
    run.kill_agents()
    run.finish()
    sources = [began["source"] for trainer in run.trainers if (began := run.opening(trainer)) and "source" in began]
    assert sources == ["memory", "disk"]
    run.check_identical(straight.ending())
    (record,) = [run.verify(entry) for entry in [run.newest()] if entry is not None]
    lying = {leaf.name: leaf.strides for leaf in record.leaves if leaf.strides is not None}
    assert len(lying) == 6 and lying["optimizer/state/0/exp_avg"] == lying["model/0.weight"] == (1, 64)
