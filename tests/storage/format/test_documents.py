"""Records, manifests, run and lineage files: what is written is read back; what does not hold together is damage."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from stepwell.errors import DamagedError
from stepwell.storage.format.document import Fields, parse_json, seal, unseal
from stepwell.storage.format.manifest import Lineage, Manifest, RecordRef, Run
from stepwell.storage.format.record import FileEntry, LeafEntry, Record, check_file_name
from stepwell.types import CheckpointId, Keep, Owner

RUN = "0123456789abcdef"
DIGEST = "ab" * 16
LEAF = LeafEntry(
    name="model/w", file=0, dtype="float32", shape=(2, 3), start=4096, end=4120, role="parameter", device="cpu",
    global_shape=(2, 3), offsets=(0, 0),
)  # fmt: skip
FILE = FileEntry("rank-00000.safetensors", "safetensors", 4120, 1 << 22, ("00" * 8,))
RECORD = Record(
    run=RUN, id=CheckpointId(3, 0, 1), owner=Owner(), created=1.5, files=(FILE,), leaves=(LEAF,), tree={"model": {}},
    versions={"torch": "2"},
)  # fmt: skip
MANIFEST = Manifest(
    run=RUN, id=CheckpointId(3, 0, 1), world_size=1, created=1.5, records=(RecordRef("rank-00000.json", 9, DIGEST),),
    nbytes=4120, suspect="1 non-finite, first model/w", epoch_end=True, name="best",
)  # fmt: skip


def test_what_is_dumped_is_loaded() -> None:
    assert Record.load(RECORD.dump(), path="x") == RECORD
    assert Manifest.load(MANIFEST.dump(), path="x") == MANIFEST
    run = Run(RUN, (1 << 64) - 1, 2.5)
    assert Run.load(run.dump(), path="x") == run
    lineage = Lineage(number=3, parent=1, step=7, created=2.5, host="h", keep=Keep(last=3, every=7, epochs=True))
    assert Lineage.load(lineage.dump(), path="x") == lineage


def test_the_fields_are_the_contract() -> None:
    """A new field, or one that is gone, is a change of the format: docs/format.md, then a new version."""
    record = ["format", "run", "step", "repeat", "lineage", "rank", "world_size", "created", "suspect", "parity",
              "versions", "files", "leaves", "tree", "checksum"]  # fmt: skip
    assert list(json.loads(RECORD.dump())) == record
    assert [*json.loads(RECORD.dump())["leaves"][0], "private", "strides"] == list(asdict(LEAF))
    own = replace(RECORD, leaves=(replace(LEAF, private=True, strides=(1, 2)),))
    assert list(json.loads(own.dump())["leaves"][0]) == list(asdict(LEAF)) and Record.load(own.dump(), path="x") == own
    manifest = ["format", "run", "step", "repeat", "lineage", "world_size", "created", "nbytes", "exact", "suspect",
                "epoch_end", "finished", "name", "records", "checksum"]  # fmt: skip
    assert list(json.loads(MANIFEST.dump())) == manifest


def test_sealed_documents_end_with_their_checksum() -> None:
    data = seal({"format": "a/1", "x": 'tricky ,"checksum":"'})
    assert data.endswith(b'"}\n') and unseal(data, path="p", kind="a/1")["x"] == 'tricky ,"checksum":"'
    for changed in (data[:-1], data + b" ", b" " + data, data.replace(b"tricky", b"Tricky"), b"", b"{}\n"):
        with pytest.raises(DamagedError, match=r"^p: checksum"):
            unseal(changed, path="p", kind="a/1")


def test_another_version_is_named() -> None:
    with pytest.raises(DamagedError, match=r"p: format 'stepwell.record/2', this version reads 'stepwell.record/1'"):
        Record.load(seal({"format": "stepwell.record/2"}), path="p")
    with pytest.raises(DamagedError, match="format None"):
        Record.load(seal({"x": 1}), path="p")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":1,"b":{"c":1,"c":2}}', "the key 'c' stands twice"),
        (b'{"a":NaN}', "NaN is not allowed"),
        (b'{"a":-Infinity}', "-Infinity is not allowed"),
        (b'{"a":1', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON"),
    ],
    ids=["duplicate", "nan", "infinity", "cut", "not utf-8", "deep list", "deep object", "long integer"],
)
def test_json_is_parsed_strictly(text: bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=rf"^p: .*{why}"):
        parse_json(text, path="p")


def test_duplicate_keys_are_found_fast_among_many() -> None:
    many = ",".join(f'"k{i}":1' for i in range(300_000))
    with pytest.raises(DamagedError, match="'k299999' stands twice"):
        parse_json(f'{{{many},"k299999":2}}'.encode(), path="p")


def test_fields_are_typed() -> None:
    document = {"n": -1, "b": True, "f": 1e999, "i": 10**400, "s": 5, "l": [1, -1], "r": "XYZ"}
    fields = Fields(document, path="p")
    for read in (
        lambda: fields.integer("n"),
        lambda: fields.integer("b"),
        lambda: fields.integer("missing"),
        lambda: fields.number("f"),
        lambda: fields.number("i"),
        lambda: fields.number("b"),
        lambda: fields.text("s"),
        lambda: fields.flag("s"),
        lambda: fields.optional_text("s"),
        lambda: fields.items("s"),
        lambda: fields.shape("l"),
        lambda: fields.raw("missing"),
        lambda: fields.run_id("r"),
    ):
        with pytest.raises(DamagedError, match=r"^p: field "):
            read()  # type: ignore[no-untyped-call]
    with pytest.raises(DamagedError, match="expected an object"):
        Fields([], path="p")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\0b",
        "a\n",
        "-x",
        ".hidden",
        "a..b",
        "x" * 201,
        "\u00fc",
        "a\\b",
        "a b",
    ],
)
def test_names_that_are_no_plain_file_names(name: str) -> None:
    with pytest.raises(DamagedError, match="not a plain file name"):
        check_file_name(name, path="p")
    with pytest.raises(DamagedError, match="not a plain file name"):
        Record.load(replace(RECORD, files=(replace(FILE, name=name),)).dump(), path="p")
    with pytest.raises(DamagedError, match="not a plain file name"):
        Manifest.load(replace(MANIFEST, records=(RecordRef(name, 9, DIGEST),)).dump(), path="p")


BAD_FILES: dict[str, dict[str, Any]] = {
    "unknown kind": {"kind": "pickle"},
    "huge": {"nbytes": 1 << 60},
    "no blocks": {"blocks": ()},
    "too many blocks": {"blocks": ("00" * 8,) * 2},
    "not a digest": {"blocks": ("zz" * 8,)},
    "digest is a number": {"blocks": (1,)},
    "no block size": {"block_bytes": 0},
    "tiny block size": {"block_bytes": 1},
    "odd block size": {"block_bytes": 5000},
    "huge block size": {"block_bytes": 1 << 40},
    "opaque with leaves": {"kind": "opaque"},
    "longer than its leaves": {"nbytes": 4121},
    "shorter than its leaves": {"nbytes": 4119},
}
BAD_LEAVES: dict[str, dict[str, Any]] = {
    "outside its file": {"start": 8192, "end": 8216},
    "before the data": {"start": 0, "end": 24},
    "not on a page": {"start": 4095, "end": 4119},
    "ends before it starts": {"start": 4120, "end": 4096},
    "negative": {"start": -24, "end": 0},
    "no such file": {"file": 1},
    "shape of another size": {"shape": (2, 2), "global_shape": (2, 2)},
    "negative shape": {"shape": (-2, -3)},
    "shape overflows": {"shape": (1 << 61, 1 << 61)},
    "unknown type": {"dtype": "load"},
    "type of a module": {"dtype": "serialization"},
    "unknown codec": {"codec": "zstd"},
    "a delta": {"parent": "step-000000000001.l0001"},
    "device is a path": {"device": "/dev/sda"},
    "strides with gaps": {"strides": (4, 1)},
    "strides that repeat": {"strides": (0, 1)},
    "strides of a huge tensor": {"strides": (1 << 61, 1)},
    "strides of another shape": {"strides": (1,)},
    "negative strides": {"strides": (-3, 1)},
    "box outside": {"offsets": (1, 0)},
    "box of other rank": {"offsets": (0,), "global_shape": (6,)},
}


@pytest.mark.parametrize("name", BAD_FILES, ids=lambda name: name.replace(" ", "_"))
def test_a_file_that_does_not_hold_together(name: str) -> None:
    with pytest.raises(DamagedError, match=r"^p: "):
        Record.load(replace(RECORD, files=(replace(FILE, **BAD_FILES[name]),)).dump(), path="p")


@pytest.mark.parametrize("name", BAD_LEAVES, ids=lambda name: name.replace(" ", "_"))
def test_a_leaf_that_does_not_hold_together(name: str) -> None:
    with pytest.raises(DamagedError, match=r"^p: "):
        Record.load(replace(RECORD, leaves=(replace(LEAF, **BAD_LEAVES[name]),)).dump(), path="p")


def test_leaves_may_neither_overlap_nor_share_a_name() -> None:
    other = replace(LEAF, name="b", shape=(3,), global_shape=(3,), offsets=(0,), start=4120, end=4132)
    file = replace(FILE, nbytes=4132)
    assert Record.load(replace(RECORD, files=(file,), leaves=(other, LEAF)).dump(), path="p")
    for changed in (
        replace(other, start=4116, end=4128),
        replace(other, name=LEAF.name),
        replace(other, start=4108, end=4120),
    ):
        with pytest.raises(DamagedError, match=r"^p: "):
            Record.load(replace(RECORD, files=(file,), leaves=(LEAF, changed)).dump(), path="p")
    with pytest.raises(DamagedError, match="two files share a name"):
        Record.load(replace(RECORD, files=(FILE, FILE)).dump(), path="p")


def test_empty_leaves_lie_between_others() -> None:
    empty = replace(LEAF, name="e", shape=(0, 2), global_shape=(0, 2), start=4096, end=4096)
    last = replace(empty, name="l", start=4120, end=4120)
    assert Record.load(replace(RECORD, leaves=(LEAF, last, empty)).dump(), path="p")


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../x"},
        {"owner": Owner(1, 1)},
        {"owner": Owner(0, 0)},
        {"parity": []},
        {"versions": "x"},
        {"created": float("inf")},
        {"suspect": 5},
    ],
    ids=str,
)
def test_a_record_that_does_not_hold_together(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match=r"^p: "):
        Record.load(replace(RECORD, **change).dump(), path="p")


@pytest.mark.parametrize(
    "change",
    [
        {"records": ()},
        {"world_size": 2},
        {"world_size": 1 << 61},
        {"records": (RecordRef("rank-00000.json", 9, "x"),)},
        {"records": (RecordRef("rank-00000.json", -1, DIGEST),)},
        {"run": "x" * 16},
        {"name": 5},
        {"exact": "yes"},
        {"nbytes": -1},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_hold_together(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match=r"^p: "):
        Manifest.load(replace(MANIFEST, **change).dump(), path="p")


def test_a_run_that_does_not_hold_together() -> None:
    for run in (Run("short", 1, 1.0), Run(RUN, -1, 1.0), Run(RUN, 1 << 64, 1.0)):
        with pytest.raises(DamagedError, match=r"^p: "):
            Run.load(run.dump(), path="p")


@pytest.mark.parametrize(
    ("directory", "is_known"),
    [
        ("step-000000000012.l0003", True),
        ("step-000000000012.l0003.r2", True),
        ("step-999999999999.l12345", True),
        ("step-12.l0003", False),
        ("step-000000000012.l0003.r0", False),
        ("step-000000000012.l00003", False),
        ("step-000000000012.l0003\n", False),
        ("step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.l0001", False),
        ("../step-000000000012.l0003", False),
        ("step-000000000012.l0003.tmp", False),
    ],
)
def test_directory_names(directory: str, is_known: bool) -> None:
    found = CheckpointId.parse(directory)
    assert (found is not None) is is_known
    if found is not None:
        assert found.directory == directory
