"""docs/format.md says what the code does: names, numbers, dumps and vectors on the page are compared with both."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from stepwell import faults
from stepwell.events import journal
from stepwell.storage.format import document, record, shard, tree
from stepwell.storage.format.checksum import BLOCK_BYTES, block_digest, document_digest
from stepwell.storage.format.manifest import Lineage, Manifest, RecordRef, Run, Void
from stepwell.storage.format.summary import MAX_SUMMARY_BYTES, SUMMARY, Summary
from stepwell.storage.store import catalog, lineage, progress
from stepwell.training.data.permutation import ORDER, Permutation
from stepwell.training.data.sampler import epoch_seed
from stepwell.training.state import flatten
from stepwell.types import CheckpointId, Keep, Owner

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "format.md").read_text()
V1 = ROOT / "tests" / "golden" / "v1"
CHECKPOINT = "step-000000000003.l0001"


def section(number: int) -> str:
    return PAGE.split(f"\n## {number}. ")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def blocks(text: str) -> list[str]:
    return re.findall(r"```\n(.*?)```", text, re.S)


def test_the_tree_is_the_golden_run() -> None:
    (drawn,) = blocks(section(2))
    found = {name: int(size) for name, size in re.findall(r"^\s*(\S+)\s+(\d+) bytes", drawn, re.M)}
    sizes = {path.relative_to(V1) for path in V1.rglob("*") if path.is_file()}
    expected = {(str(p) if p.parts[0] != CHECKPOINT else p.name): (V1 / p).stat().st_size for p in sizes}
    assert found == expected


def test_the_dump_is_the_golden_frozen_file() -> None:
    (dump,) = blocks(section(3))
    data = (V1 / CHECKPOINT / "rank-00000.frozen.safetensors").read_bytes()
    lines = [line for line in dump.splitlines() if line != "*"]
    for line in lines:
        start, rest = int(line[:8], 16), line[10:49].replace(" ", "")
        assert data[start : start + len(rest) // 2] == bytes.fromhex(rest)
    assert set(data[0x80:0x1000]) == {0x20} and len(data) == 0x1006


def test_the_fields_are_all_there() -> None:
    text = section(4)
    names = {name for row in rows(text) for name in quoted(row[0])}
    run = Run("0" * 16, 1, 1.0)
    line = Lineage(number=1, parent=0, step=0, created=1.0, host="h", lossy="of what", keep=Keep())
    manifest = Manifest(run="0" * 16, id=CheckpointId(1, 0, 1), world_size=1, created=1.0,
                        records=(RecordRef("r", 1, "0" * 32),), nbytes=1)  # fmt: skip
    written = set(json.loads((V1 / CHECKPOINT / "rank-00000.json").read_bytes()))
    void = Void("0" * 16, CheckpointId(1, 0, 1), 1, "why")
    owner = Owner(3, 4)
    summary = Summary("0" * 16, CheckpointId(1, 0, 1), owner, 1.0, 1, "0" * 32, 1, None, {})
    for made in (run, line, manifest, void, summary):
        written |= set(json.loads(made.dump()))
    written |= {field.name for field in fields(record.LeafEntry)} | {"copies", "elsewhere", "partners"}
    assert names == written - {"format", "checksum"}
    for field in (*fields(record.FileEntry), *fields(RecordRef)):
        assert f"`{field.name}`" in text
    for kind in (
        record.KIND,
        "stepwell.manifest/1",
        "stepwell.run/1",
        "stepwell.lineage/1",
        "stepwell.void/1",
        SUMMARY,
    ):
        assert f"`{kind}`" in text
    (golden,) = blocks(text)
    assert golden.encode() == (V1 / "run.json").read_bytes()
    own = json.loads((V1 / CHECKPOINT / "rank-00000.json").read_bytes())["tree"]["stepwell"]
    for name in (*own, *own["rng"]):
        assert f"`{name}`" in text


def test_progress_has_the_size_and_mark_it_is_said_to_have() -> None:
    assert f"{progress._FORMAT.size} bytes" in section(4) and progress._MAGIC.decode() in section(4)


def test_the_tags_are_all_there() -> None:
    """Every `$tag` in the two modules that write and read them, and no other."""
    source = inspect.getsource(tree) + inspect.getsource(flatten)
    known = set(re.findall(r'"(\$[a-z_]+)"', source))
    known |= {"$bytes", "$bytearray", "$set", "$frozenset", "$range", "$slice"}  # written with the name of the type
    assert {tag for row in rows(section(5)) for tag in quoted(row[0]) if tag.startswith("$")} == known


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("record | 64 MiB", document.MAX_DOCUMENT_BYTES == 64 << 20),
        ("manifest | 16 MiB", catalog._MAX_MANIFEST_BYTES == 16 << 20),
        ("summary | 1 MiB", MAX_SUMMARY_BYTES == 1 << 20),
        ("`run.json`, lineage | 64 KiB", lineage._MAX_BYTES == 64 << 10),
        ("shard header | 100 000 000 bytes", shard.MAX_HEADER_BYTES == 100_000_000),
        ("block | 64 MiB, a multiple of 4096", record.MAX_BLOCK_BYTES == 64 << 20),
        ("written with 4 MiB", BLOCK_BYTES == 4 << 20),
        ("depth of values | 100", tree.MAX_DEPTH == 100),
        ("lineages of a run | 1 000 000", lineage._MAX_LINEAGES == 1_000_000),
        ("event line | 1 MiB", journal._MAX_LINE_BYTES == 1 << 20),
        ("file name | 200", "{0,199}" in record._FILE_NAME.pattern),
    ],
)
def test_the_limits(text: str, value: bool) -> None:
    assert text in section(6) and value


def test_the_crash_points_are_all_there_in_order() -> None:
    found = [quoted(row[0])[0] for row in rows(section(10)) if quoted(row[0])]
    assert sorted(found) == sorted(faults.POINTS)


def test_the_vectors() -> None:
    text = section(13)
    inputs = {"no bytes": b"", "`stepwell`": b"stepwell", "4 MiB of zeros": bytes(4 << 20)}
    checked = 0
    for row in rows(text):
        if row[0] in inputs:
            assert quoted(row[1]) == [block_digest(inputs[row[0]])]
            assert not row[2] or quoted(row[2]) == [document_digest(inputs[row[0]])]
            checked += 1
        elif quoted(row[0]):
            name = quoted(row[0])[0]
            place = V1.parent if name.startswith("v1strides/") else V1
            assert quoted(row[1]) == [block_digest((place / name).read_bytes())]
            checked += 1
    of_strides = (V1.parent / "v1strides" / CHECKPOINT).iterdir()
    assert checked == 3 + len([path for path in V1.rglob("*") if path.is_file()]) + len(list(of_strides))
    (values,) = blocks(text)
    assert json.loads(values) == json.loads((V1 / CHECKPOINT / "rank-00000.json").read_bytes())["tree"]["values"]
    assert str(epoch_seed(7, 3)) in text
    order = Permutation(1000, seed=7, epoch=3).at(torch.arange(1000)).tolist()
    assert f"{order[0]}, {order[1]}, {order[2]} at its first positions and {order[-1]}" in " ".join(text.split())
    assert f"`{ORDER}`" in text


def test_the_page_is_ascii() -> None:
    assert PAGE.isascii()
