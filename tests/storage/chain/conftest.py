"""The runs of the crash tests, wide enough for chains."""

from __future__ import annotations

import pytest

from tests.crash.conftest import MakeRun, make_run
from tests.crash.harness import Ending, Run, Server, undisturbed

WIDE = {"TRAIN_WIDTH": "1024"}
CHAINS = {**WIDE, "TRAIN_DELTAS": "lc(bits=3)", "TRAIN_PACE": "0.03", "TRAIN_EVERY": "6"}
__all__ = ["make_run", "reference", "run"]


@pytest.fixture(scope="session")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """How the run ends without chains when nothing happens to it."""
    return undisturbed(server, tmp_path_factory.mktemp("reference"), **WIDE)


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return make_run(**CHAINS)
