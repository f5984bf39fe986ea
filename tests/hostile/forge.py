"""Forged run directories: changed at will, with every checksum made right again.

The checksums are no secret, so a forger computes them. `Forgery` starts from a good run with two checkpoints, step 1
and step 2, and changes the newer one; `reseal` makes record, manifest and block checksums agree with the change.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepwell.storage.format.checksum import block_digest, document_digest
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId
from tests.restore.build import RunBuilder

Change = Callable[[dict[str, Any]], Any]


BIG = 16384
"""Elements of the leaf that would fill the memory if it were copied for each mention of it."""


def values(step: int) -> dict[str, Any]:
    return {"note": [step, "text"], "big": torch.arange(float(BIG)) + step, "small": torch.full((3,), step)}


def net(step: int) -> torch.nn.Module:
    model = torch.nn.Linear(2, 3)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, step)
    return model


def seal_text(body: str | bytes) -> bytes:
    """Any JSON object text with its checksum at the end, valid JSON or not."""
    data = body.encode() if isinstance(body, str) else body
    return data[:-1] + f',"checksum":"{document_digest(data)}"}}\n'.encode()


@functools.cache
def original() -> Path:
    """The good run, made once in a process."""
    root = Path(tempfile.mkdtemp(prefix="stepwell-original-")) / "run"
    atexit.register(shutil.rmtree, root.parent)
    build = RunBuilder(root)
    for step in (1, 2):
        build.write({"values": values(step), "model": net(step).state_dict()}, step)
    return root


class Forgery:
    """A run directory in the hands of a forger. `canary` lies beside it: whoever touches that was led astray."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.canary = root.parent / "canary"
        self.canary.mkdir()
        (self.canary / "secret").write_text("nobody may read this")
        shutil.copytree(original(), root)
        self.paths = RunPaths(root)
        self.id = CheckpointId(2, 0, 1)
        self.directory = self.paths.checkpoint(self.id)
        self.record_path = self.directory / "rank-00000.json"
        self.manifest_path = self.directory / "manifest.json"
        self.shard_path = self.directory / "rank-00000.safetensors"

    def document(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_bytes())
        found.pop("checksum")
        return found

    def record(self, change: Change) -> None:
        """Change the record; everything still adds up."""
        document = self.document(self.record_path)
        change(document)
        self.record_text(json.dumps(document))

    def record_text(self, text: str | bytes) -> None:
        self.record_path.write_bytes(seal_text(text))
        self.reseal()

    def tree(self, value: Any, at: str = "values") -> None:
        """Put typed JSON in the place of a tracked object's state."""
        self.record(lambda document: document["tree"].__setitem__(at, value))

    def value(self, value: Any) -> None:
        """Put typed JSON in the place of one value."""
        self.record(lambda document: document["tree"]["values"].__setitem__("note", value))

    def own(self, **changes: Any) -> None:
        """Change the run's own state."""
        self.record(lambda document: document["tree"]["stepwell"].update(changes))

    def leaf(self, **changes: Any) -> None:
        """Change what the record says of its first leaf."""
        self.record(lambda document: document["leaves"][0].update(changes))

    def file(self, **changes: Any) -> None:
        """Change what the record says of the shard."""
        self.record(lambda document: document["files"][0].update(changes))

    def shard(self, change: Callable[[bytearray], Any]) -> None:
        """Change bytes of the shard, and make its checksums right."""
        data = bytearray(self.shard_path.read_bytes())
        change(data)
        self.shard_path.write_bytes(data)
        self.file(blocks=[block_digest(data)])

    def manifest(self, change: Change) -> None:
        document = self.document(self.manifest_path)
        change(document)
        self.manifest_path.write_bytes(seal_text(json.dumps(document)))

    def reseal(self) -> None:
        """Let the manifest name the record as it is now."""
        data = self.record_path.read_bytes()
        ref = {"name": self.record_path.name, "nbytes": len(data), "digest": document_digest(data)}
        self.manifest(lambda document: document.update(records=[ref]))

    def lineage(self, at: int, **fields: Any) -> None:
        """Write a lineage file that says anything."""
        document = {"format": "stepwell.lineage/1", "number": at, "parent": at - 1, "step": 2, "created": 1.0,
                    "host": "h", **fields}  # fmt: skip
        self.paths.lineage(at).write_bytes(seal_text(json.dumps(document)))

    def run(self, **changes: Any) -> None:
        document = self.document(self.paths.run)
        document.update(changes)
        self.paths.run.write_bytes(seal_text(json.dumps(document)))


def sparse(path: Path, nbytes: int) -> None:
    """A file that claims a size and holds nothing."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)
