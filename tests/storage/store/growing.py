"""What a commit asks of its storage: opens, looks and requests are counted, not seconds."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.storage.format.manifest import Lineage, Manifest, RecordRef
from stepwell.storage.store import commit, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner

LOOKS = ("exists", "is_directory", "facts", "appeared", "list_names", "list_facts")
REQUESTS = ("get", "get_range", "put", "head", "list", "list_with_delimiter", "delete", "copy")
_counters: list[Counter[str]] = []


def _on_audit(event: str, _: tuple[Any, ...]) -> None:
    if _counters and event in ("open", "os.listdir", "os.scandir"):
        _counters[-1][event] += 1


@contextlib.contextmanager
def counted(where: object) -> Iterator[Counter[str]]:
    """Opens and looks in a directory, or requests to a bucket, within this block."""
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        module: Any = files
        names = LOOKS
        if isinstance(where, ObjectPath):
            import obstore as module

            names = REQUESTS
        else:
            if not _on_audit.__dict__.setdefault("is_added", False):
                sys.addaudithook(_on_audit)
                _on_audit.__dict__["is_added"] = True
            _counters.append(found)
            stack.callback(_counters.pop)
        for name in names:
            stack.enter_context(mock.patch.object(module, name, _noted(found, name, getattr(module, name))))
        yield found


def _noted(found: Counter[str], name: str, real: Any) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        found[name] += 1
        return real(*args, **more)

    return call


class Committer:
    """An agent's writing side without its process: one rank, checkpoints without shards."""

    def __init__(self, paths: RunPaths, log: Path, *, keep: Keep, restarts: int = 1) -> None:
        self.run = open_run(paths, seed=1).id
        files.make_directory(paths.lineages)
        for number in range(1, restarts):
            link = Lineage(number=number, parent=number - 1, step=number - 1, created=0.0, host="h")
            _write(paths.lineage(number), link.dump())
        self.lineage = create_next(paths, parent=restarts - 1, step=restarts - 1).number
        self.paths, self.keep, self.step = paths, keep, restarts
        self.persister = Persister(paths.remembering(), journal.EventLog(log, who="test"), lineage=self.lineage)

    def manifest(self, step: int) -> Manifest:
        record = RecordRef("rank-00000.json", 1, "0" * 32)
        return Manifest(
            run=self.run, id=CheckpointId(step, 0, self.lineage), world_size=1, created=0.0, records=(record,), nbytes=1
        )

    def fill(self, count: int) -> None:
        """So many checkpoints were committed before."""
        for _ in range(count):
            self.step += 1
            manifest = self.manifest(self.step)
            if not isinstance(self.paths.root, ObjectPath):
                files.make_directory(self.paths.checkpoint(manifest.id))
            _write(self.paths.manifest(manifest.id), manifest.dump())

    def commit(self) -> None:
        """One more, and what comes after it."""
        self.step += 1
        manifest = self.manifest(self.step)
        commit.open_checkpoint(self.persister.paths, manifest.id, Owner())
        commit.publish_manifest(self.persister.paths, manifest)
        assert self.persister.prune(self.lineage, self.keep)

    def cost(self) -> Counter[str]:
        """What a commit asks for, when the agent has committed before."""
        for _ in range(3):
            self.commit()
        with counted(self.paths.root) as found:
            self.commit()
        return found


def _write(path: Any, data: bytes) -> None:
    if isinstance(path, ObjectPath):
        files.put(path, data, point="test")
    else:
        path.write_bytes(data)
