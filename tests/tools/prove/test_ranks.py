"""`stepwell prove -- torchrun ...`: kills of one rank, one agent and everything, and a comparison of all ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import ProgressFile
from stepwell.tools.prove.rank_facts import count_ranks, find_agents, find_processes
from tests.ranks.conftest import soak
from tests.tools.prove.commands import ROOT, Outcome, processes_in, prove

SCRIPT = ROOT / "tests" / "tools" / "prove" / "scripts" / "ranks.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def prove_ranks(out: Path, ranks: int, *flaw: str, kills: int, seed: int, restarts: int = 0) -> Outcome:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    more = ["--max-restarts", restarts, "--monitor-interval", "0.2"]
    return prove(
        out, *launcher, *more, SCRIPT, *flaw, kills=kills, seed=seed, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )


@pytest.mark.parametrize(
    ("ranks", "kills", "restarts"),
    [(2, 1, 0), soak(2, 3, 0), soak(4, 6, 0), soak(4, 9, 5)],
    ids=["one_kill", "small", "launcher_ends", "launcher_restarts"],
)
def test_killed_ranks_end_with_the_same_bits(ranks: int, kills: int, restarts: int, tmp_path: Path) -> None:
    outcome = prove_ranks(tmp_path / "out", ranks, kills=kills, seed=3, restarts=restarts)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    document = outcome.document
    assert (document["verdict"], document["ranks"]) == ("identical", ranks)
    assert f" of {ranks} ranks (" in outcome.stdout
    assert "prove set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the command" in outcome.stdout
    for kill in document["kills"]:
        assert kill["victim"].split()[0] in ("rank", "agent", "everything")
        assert kill["is_restart"] == (kill["resumed"] is not None) == (not kill["victim"].startswith("agent"))
        assert kill["victim"] != "everything" or kill["source"] == "disk"
    if kills >= 3:
        kinds = {kill["victim"].split()[0] for kill in document["kills"]}
        assert kinds == {"rank", "agent", "everything"}
    assert ("restarted all ranks" in outcome.stderr) <= (restarts > 0)
    assert document["logged"]["values"] == ranks * document["steps"]
    assert processes_in(tmp_path / "out") == []


@pytest.mark.soak
@pytest.mark.parametrize("flaw", ["rebuild", "untracked"])
def test_control_a_flaw_of_many_ranks_is_seen(flaw: str, tmp_path: Path) -> None:
    outcome = prove_ranks(tmp_path / "out", 4, flaw, kills=2, seed=1)
    assert outcome.code == 1, outcome.stdout + outcome.stderr
    assert outcome.document["verdict"] == "different"
    if flaw == "rebuild":
        assert "find_unused_parameters=True" in outcome.document["causes"][0]


def test_ranks_are_found_by_what_they_wrote(tmp_path: Path) -> None:
    files = [ProgressFile(RunPaths(tmp_path, rank).progress, lambda call: call()) for rank in range(3)]
    assert count_ranks(tmp_path) == 1 and find_processes(tmp_path, 3) is None
    for rank, file in enumerate(files):
        assert find_processes(tmp_path, 3) is None
        file.open(lineage=1, agent_pid=100 + rank, step=rank)
    found = find_processes(tmp_path, 3)
    assert found is not None and count_ranks(tmp_path) == 3
    assert (found.lineage, found.step, found.agents) == (1, 2, [100, 101, 102])
    assert found.trainers == [os.getpid()] * 3
    assert find_processes(tmp_path, 3, after=1) is None
    files[1].close()
    files[1].open(lineage=2, agent_pid=201, step=0)
    assert find_processes(tmp_path, 3) is None  # some of the next start are not there yet
    assert find_agents(tmp_path, 3) == {100, 201, 102}
    for file in files:
        file.close()
