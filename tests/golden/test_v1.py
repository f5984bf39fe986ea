"""The golden run of format 1: restores to known values for ever, and today's writer still writes it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stepwell.restore.byte_sources import FileSource
from stepwell.restore.load import load
from stepwell.restore.whole import Part
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.document import unseal
from stepwell.storage.format.record import KIND, Record
from stepwell.storage.format.shard import LeafSpec, lay_out, parse_header
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from stepwell.training.state import rng
from stepwell.training.state.flatten import flatten
from stepwell.training.state.tracked import track
from tests.golden import make
from tests.restore.build import damage_events, restore
from tests.training.state.same import difference

V1 = Path(__file__).parent / "v1"
CHECKPOINT = V1 / "step-000000000003.l0001"
FILES = {
    "lineage/0001.json": "7af135197d8a8bd7",
    "run.json": "f6f6538d249597e2",
    "step-000000000003.l0001/manifest.json": "33b30f75e62ffe79",
    "step-000000000003.l0001/rank-00000.file.notes": "eda88a0322749326",
    "step-000000000003.l0001/rank-00000.frozen.safetensors": "d6ad001a7d44d9e1",
    "step-000000000003.l0001/rank-00000.json": "20c8de252fb5a168",
    "step-000000000003.l0001/rank-00000.safetensors": "7f4bf6ea9ed7c87c",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: restoring adds a lineage."""
    return Path(shutil.copytree(V1, tmp_path / "run"))


def test_the_committed_bytes_are_untouched() -> None:
    found = {str(path.relative_to(V1)): block_digest(path.read_bytes()) for path in V1.rglob("*") if path.is_file()}
    assert found == FILES


def test_it_restores_to_known_values(run: Path) -> None:
    (entry,) = scan(RunPaths(run))
    assert entry.is_good and entry.is_live
    model: dict[str, Any] = {}
    values: dict[Any, Any] = {}
    found = restore(run, {"model": model, "values": values})
    assert damage_events(run) == []
    assert (found.run.id, found.run.seed) == ("60a1d00000000001", 7)
    assert model["weight"].tolist() == [[1.0, -2.0, 0.5], [0.0, 3.25, -0.0]]
    assert model["bias"].dtype is torch.bfloat16 and model["bias"].tolist() == [1.0, -1.5]
    assert model["embed"].tolist() == [1, 2, 3] and model["count"].item() == 3
    assert values["0"] == ("tuple", [b"bytes", float("inf"), 2**70]) and values[0] == "int key"
    assert values["array"].dtype.str == ">i2" and values["array"].tolist() == [[1, 2]]
    assert difference(values, make.state()["values"]) is None
    assert found.own is not None and (found.own["epoch"], found.own["consumed"]) == (1, 2)
    rng.restore(found.own["rng"])
    assert [random.randrange(1000), int(numpy.random.randint(1000)), int(torch.randint(1000, ()))] == [137, 37, 845]


def own_state() -> dict[str, Any]:
    """The run's own state as the golden checkpoint holds it: how torch seeds a generator is not our format."""
    record = Record.load((CHECKPOINT / "rank-00000.json").read_bytes(), path="golden")
    objects = track({"model": {}, "values": {}})
    loaded = load([Part(record, lambda file: FileSource(CHECKPOINT / file.name))], objects, only=None, strict=True)
    own: dict[str, Any] = loaded.own
    return own


def test_todays_writer_writes_the_same_bytes(tmp_path: Path) -> None:
    make.make(tmp_path / "run", own_state())
    for name in FILES:
        old, new = (V1 / name).read_bytes(), (tmp_path / "run" / name).read_bytes()
        if name.endswith("rank-00000.json"):  # says which torch wrote it
            documents = [unseal(data, path=name, kind=KIND) for data in (old, new)]
            for document in documents:
                document.pop("versions")
                document.pop("checksum")
            assert json.dumps(documents[0]) == json.dumps(documents[1])
        elif name.endswith("manifest.json"):  # names the record by digest
            assert old.split(b'"records"')[0] == new.split(b'"records"')[0]
        else:
            assert old == new, name


def test_todays_layout_has_the_same_header() -> None:
    flat = flatten({**make.state(), "stepwell": own_state()})
    specs = [LeafSpec(leaf.name, leaf.dtype, tuple(leaf.tensor.shape)) for leaf in flat.leaves]
    for name, is_frozen in (("rank-00000.safetensors", False), ("rank-00000.frozen.safetensors", True)):
        layout = lay_out(spec for spec in specs if (spec.name in make.FROZEN) is is_frozen)
        stored = (CHECKPOINT / name).read_bytes()
        assert stored[: len(layout.header)] == layout.header and len(stored) == layout.nbytes
        assert len(parse_header(layout.header, len(stored), path=name)) == len(layout.placements)
