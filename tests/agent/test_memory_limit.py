"""How much memory may be taken: the limits of the memory cgroups count, not only the free memory of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.handover import memory

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def make_cgroup(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


@pytest.mark.parametrize("names", [V1, V2])
def test_the_tightest_limit_counts(
    names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = memory.available_bytes()
    assert free > 500 * MIB, "this test needs a machine with 500 MiB free"
    own, job = tmp_path / "job" / "task", tmp_path / "job"
    monkeypatch.setattr(memory, "_cgroups", lambda: iter([(own, *names), (job, *names), (tmp_path / "none", *names)]))
    make_cgroup(own, names, "max", 50 * MIB, 0)
    make_cgroup(job, names, str(1 << 62), 60 * MIB, 0)
    assert memory.available_bytes() > 400 * MIB
    make_cgroup(job, names, str(300 * MIB), 200 * MIB, 0)
    assert memory.available_bytes() == 100 * MIB
    make_cgroup(job, names, str(300 * MIB), 200 * MIB, 30 * MIB)  # file cache is taken back by the kernel
    assert memory.available_bytes() == 130 * MIB
    make_cgroup(own, names, str(64 * MIB), 63 * MIB, 0)
    assert memory.available_bytes() == MIB
    make_cgroup(own, names, str(64 * MIB), 70 * MIB, 0)
    assert memory.available_bytes() == 0


def test_the_own_cgroup_is_looked_at_first() -> None:
    """Whatever this machine has: every memory controller in /proc/self/cgroup, from the own directory to the top."""
    found = [directory for directory, *_ in memory._cgroups()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("memory", ""):
            assert any(str(directory).endswith(path.rstrip("/")) for directory in found)
