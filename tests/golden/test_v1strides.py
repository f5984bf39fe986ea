"""The golden run whose tensors do not lie row by row: known values at known places, for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stepwell.restore.byte_sources import FileSource
from stepwell.restore.load import load
from stepwell.restore.whole import Part
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.document import unseal
from stepwell.storage.format.record import KIND
from stepwell.storage.store.catalog import read_manifest, read_record, scan
from stepwell.storage.store.paths import RunPaths
from stepwell.training.state.tracked import track
from tests.golden import make
from tests.restore.build import damage_events, restore
from tests.training.state.same import difference

ROOT = Path(__file__).parent / "v1strides"
RECORD = "step-000000000003.l0001/rank-00000.json"
FILES = {
    "lineage/0001.json": "7af135197d8a8bd7",
    "run.json": "f6f6538d249597e2",
    "step-000000000003.l0001/manifest.json": "0536e698209abfb0",
    RECORD: "5141df93eca9bc3c",
    "step-000000000003.l0001/rank-00000.safetensors": "9da8fdabc9d56981",
}


def test_the_committed_bytes_are_untouched() -> None:
    found = {str(path.relative_to(ROOT)): block_digest(path.read_bytes()) for path in ROOT.rglob("*") if path.is_file()}
    assert found == FILES


def test_it_restores_to_known_values_at_known_places(tmp_path: Path) -> None:
    run = Path(shutil.copytree(ROOT, tmp_path / "run"))
    values: dict[str, Any] = {}
    restore(run, {"values": values})
    assert damage_events(run) == []
    assert difference(values, make.woven()["values"]) is None
    strides = {name: value.stride() for name, value in values.items() if name != "array"}
    assert strides == {"channels_last": (12, 1, 6, 3), "one row": (12, 4, 2, 1), "transposed": (1, 3), "gaps": (2, 1)}
    assert values["array"].flags.f_contiguous


def test_todays_writer_writes_the_same(tmp_path: Path) -> None:
    (entry,) = scan(RunPaths(ROOT))
    record = read_record(RunPaths(ROOT), read_manifest(RunPaths(ROOT), entry.id))
    part = Part(record, lambda file: FileSource(entry.path / file.name))
    loaded = load([part], track({"values": {}}), only=None, strict=True)
    make.make_woven(tmp_path / "run", loaded.own)
    old, new = (unseal((root / RECORD).read_bytes(), path="x", kind=KIND) for root in (ROOT, tmp_path / "run"))
    assert {**old, "versions": 0, "checksum": 0} == {**new, "versions": 0, "checksum": 0}
