"""The section of docs/format.md on chains says what the code does: sizes, fields, names, and a record byte by byte."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np

from stepwell.storage.chain import chain_document, chain_record, segment
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs import coding_groups, huffman, parts
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import LC, REGISTRY
from tests.storage.format.test_format_doc import PAGE, blocks, quoted, rows

SECTION = PAGE.split("\n## Chains of lossy checkpoints")[1].split("\n## ")[0]


def make(directory: Path) -> None:
    """The chain of the page: eight entries, two of which change."""
    leaf = CodedLeaf("x", "float32", (8,), "parameter")
    value = np.ones(8, np.float32)
    deltas = Deltas(parameters=LC(bits=2, entropy="huffman"), small="pool")
    with ChainWriter.start(directory, [leaf], {"x": value}, step=5, deltas=deltas) as chain:
        chain.append(6, {"x": value + np.array([0, 0, 0.5, 0, -0.25, 0, 0, 0], np.float32)})


def test_the_record_on_the_page(tmp_path: Path) -> None:
    make(tmp_path / "chain")
    tree, dump = blocks(SECTION)[:2]
    data = (tmp_path / "chain" / segment.segment_name(1)).read_bytes()
    drawn = b"".join(bytes.fromhex(line[10:49].replace(" ", "")) for line in dump.splitlines())
    assert drawn == data
    sizes = {name: int(size) for name, size in re.findall(r"^(\S+)\s+(\d+) bytes", tree, re.M)}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "chain").iterdir()}
    # 1 + 0.5 and 1 - 0.25, from the two representatives in the record.
    assert restore(tmp_path / "chain").leaves["x"].tolist() == [1, 1, 1.5, 1, 0.75, 1, 1, 1]


def test_the_head() -> None:
    table = [row for row in rows(SECTION) if re.match(r"\d+ to \d+", row[0])]
    expected = 0
    for row in table:
        first, last = map(int, row[0].split(" to "))
        assert first == expected, row
        expected = last + 1
    assert expected == chain_record.HEAD_NBYTES
    named = {name for row in table for name in quoted(row[1])}
    assert {field.name for field in fields(chain_record.Head)} <= named
    assert chain_record.MAGIC.decode() in SECTION and all(
        f"{i} {kind}" in SECTION for i, kind in enumerate(chain_record.KINDS)
    )


def test_the_document(tmp_path: Path) -> None:
    make(tmp_path / "chain")
    found = json.loads((tmp_path / "chain" / chain_document.NAME).read_bytes())
    assert chain_document.KIND in SECTION
    for name in (*found, *found["leaves"][0]):
        assert f"`{name}`" in SECTION or name in ("format", "checksum"), name


def test_kinds_of_groups_flags_and_limits() -> None:
    kinds = ("nothing changed", "coded, its table follows", "coded with the table of the record before", "its values")
    for number, name in enumerate(kinds):
        assert f"{number} {name}" in " ".join(SECTION.split())
    assert (coding_groups.SAME, coding_groups.FRESH, coding_groups.AGAIN, coding_groups.EXACT) == (0, 1, 2, 3)
    assert (parts.HUFFMAN, parts.OLD_CODES, parts.NEW_DICTIONARY, parts.DICTIONARY) == (1, 2, 4, 8)
    assert f"blocks of {huffman.BLOCK}" in SECTION and f"{huffman.TABLE_NBYTES} bytes" in SECTION
    assert {name for row in rows(SECTION) for name in quoted(row[0])} >= set(REGISTRY)
