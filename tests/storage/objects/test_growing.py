"""What a commit costs in a bucket does not grow with what was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep
from tests.crash.harness import report
from tests.ranks.conftest import soak
from tests.storage.store.growing import Committer


@pytest.mark.parametrize("kept", [40, soak(1_000)])
def test_a_commit_takes_as_many_requests_beside_many_kept_checkpoints(
    kept: int, address: ObjectPath, tmp_path: Path
) -> None:
    costs = []
    for name, count in (("few", 4), ("many", kept)):
        paths = RunPaths(address / name)
        made = Committer(paths, tmp_path / "events", keep=Keep(every=1), restarts=count)
        made.fill(count)
        costs.append(made.cost())
    report(f"requests of a commit in a bucket: {costs[0].total()} with 4 kept, {costs[1].total()} with {kept} kept")
    assert costs[0] == costs[1]
    assert costs[0].total() < 60
