"""Every file operation of the agent fails in turn, in every way: the agent says so and goes on.

The operations are not written down here: they are recorded from the code, run once without faults. Each of them then
fails in a fresh agent process. Afterwards: an event names the failure, the two newest good checkpoints are untouched,
the next save works, and nothing half-written is left.
"""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.faults import OPERATIONS
from stepwell.handover.protocol import Durable, WriteFailed
from stepwell.storage.store import catalog, files
from stepwell.types import Keep
from tests.agent.puppet import Puppet, listing, verify

SAVES = 4
"""Two good ones, one that prunes nothing yet is replaced, one in the steady state: commit and prune."""
ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
FROZEN_BYTES = 5_000


@dataclass(frozen=True)
class Operation:
    """The nth call of a file operation in the life of an agent, and what it was for."""

    op: str
    nth: int
    name: str
    save: int
    is_prune: bool

    @property
    def is_frozen_link(self) -> bool:
        return self.op in ("link", "unlink") and self.name.endswith(".frozen.safetensors") and not self.is_prune

    @property
    def is_spare(self) -> bool:
        """An old shard gets another name, to be overwritten. Where that fails, a new file is written."""
        return self.op == "rename" and (self.name.startswith("spare.") or self.name.endswith(".safetensors.tmp"))

    @property
    def has_another_way(self) -> bool:
        return self.is_frozen_link or self.is_spare


def record_operations(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """All operations of the saves of an agent, in order: the agent's own code, run in this process."""
    found: list[Operation] = []
    now = {"save": 0, "is_prune": False}

    def record(op: str, path: object, length: int = 0) -> int:
        nth = 1 + sum(1 for operation in found if operation.op == op)
        found.append(Operation(op, nth, Path(str(path)).name, **now))  # type: ignore[arg-type]
        return length

    puppet = Puppet(root, frozen_bytes=FROZEN_BYTES)
    puppet.start()
    persister = Persister(puppet.paths, journal.EventLog(root / "recorded.jsonl", who="agent"), lineage=puppet.lineage)
    with monkeypatch.context() as patch:
        patch.setattr(files, "file_operation", record)
        for step in range(1, SAVES + 1):
            sequence = puppet.next_number()
            now.update(save=step, is_prune=False)
            puppet.fill_frozen()
            puppet.complete(step, step % 2, sequence)
            persister.persist(puppet.pending(step, step % 2))
            now["is_prune"] = True
            persister.prune(puppet.lineage, Keep())
    assert puppet.close()
    return found


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    with pytest.MonkeyPatch.context() as patch:
        return record_operations(tmp_path_factory.mktemp("recorded") / "run", patch)


def fail_at(operation: Operation, error: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One agent whose operation fails; all that must hold afterwards."""
    monkeypatch.setenv("STEPWELL_FAULT", f"agent!{operation.op}:{error}:{operation.nth}")
    puppet = Puppet(root, frozen_bytes=FROZEN_BYTES)
    puppet.start()
    where = f"{operation} {error}"
    for step in range(1, SAVES + 1):
        good = {entry.path: listing(entry.path) for entry in puppet.good()[:2]}
        fails = operation.save == step and not operation.is_prune and not operation.has_another_way
        assert isinstance(puppet.save(step), WriteFailed if fails else Durable), where
        if fails:
            assert {path: listing(path) for path in good} == good, where
    later = SAVES + 2
    assert isinstance(puppet.save(SAVES + 1), Durable) and isinstance(puppet.save(later), Durable), where
    assert puppet.close(), where
    failures = puppet.events("persist-failed") + puppet.events("prune-failed")
    assert len(failures) == (0 if operation.has_another_way else 1), f"{where}: {failures}"
    for failure in failures:
        assert failure["kind"] == ("prune-failed" if operation.is_prune else "persist-failed"), f"{where}: {failure}"
        assert f"[Errno {getattr(errno, error)}]" in failure["error"], f"{where}: {failure}"
    assert puppet.steps() == [later, later - 1], where
    for entry in puppet.good():
        verify(puppet.paths, entry)
    left = [*root.rglob("*.tmp")] + [e.id for e in catalog.scan(puppet.paths) if not e.is_committed]
    assert not left, f"{where}: {left}"


def test_all_operations_are_recorded(operations: list[Operation]) -> None:
    """So the tests below fail everything there is, the overwriting of an old shard included."""
    assert sum(operation.is_spare for operation in operations) > 1
    assert {operation.op for operation in operations} == set(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_failed_operation(
    op: str, operations: list[Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [operation for operation in operations if operation.op == op][::2]  # the others are left to the soak
    for number, (operation, error) in enumerate(zip(chosen, itertools.cycle(ERRORS), strict=False)):
        fail_at(operation, error, tmp_path / str(number), monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_failed_operation_in_every_way(
    op: str, error: str, operations: list[Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for operation in operations:
        if operation.op == op:
            fail_at(operation, error, tmp_path / str(operation.nth), monkeypatch)


def test_short_writes_are_continued(
    operations: list[Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = sum(1 for operation in operations if operation.op == "write")
    for nth in (*(str(n) for n in range(1, writes + 1)), "1+"):
        monkeypatch.setenv("STEPWELL_FAULT", f"agent!write:SHORT:{nth}")
        puppet = Puppet(tmp_path / nth, frozen_bytes=FROZEN_BYTES)
        puppet.start()
        for step in range(1, SAVES + 1):
            assert isinstance(puppet.save(step), Durable)
        assert puppet.close()
        for entry in puppet.good():
            verify(puppet.paths, entry)
        assert puppet.steps() == [SAVES, SAVES - 1]
