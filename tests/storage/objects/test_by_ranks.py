"""What a commit and a restart ask of a bucket, by the number of ranks: `docs/ranks.md` has the table."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from stepwell.storage.store.objects import ObjectPath
from tests.storage.store.ranks import Job

PAGE = (Path(__file__).parents[3] / "docs" / "ranks.md").read_text()


def test_requests_by_ranks(address: ObjectPath, tmp_path: Path) -> None:
    costs: dict[int, dict[str, Counter[str]]] = {}
    for size in (2, 6, 10):
        job = Job(address / str(size), tmp_path / "log", size)
        costs[size] = {**job.cost(), "restart": job.restart(1)}
    rows = dict(re.findall(r"^\| ([a-z][^|]*?) \| [^|]* \| (\d+(?: \+ \d+ N)?) \|", PAGE, re.M))
    for what, row in (
        ("rank 1 writes", "a rank writes its part, apart from the shard's bytes"),
        ("rank 1 looks too early", "a rank looks, and it is not decided"),
        ("rank 1 looks", "a rank looks, and it is committed"),
        ("restart", "a rank finds its part at a restart"),
    ):
        assert {str(costs[size][what].total()) for size in costs} == {rows[row]}, (what, costs)
    leader = {size: costs[size]["rank 0 commits"].total() for size in costs}
    each = (leader[10] - leader[6]) // 4
    assert [leader[size] for size in costs] == [leader[2] + each * (size - 2) for size in costs]
    assert rows["rank 0 commits"] == f"{leader[2] - 2 * each} + {each} N"
