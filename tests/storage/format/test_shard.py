"""The layout of a shard: what stock safetensors reads is what was laid out, from a page boundary on and aligned."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from stepwell.errors import DamagedError
from stepwell.storage.format import dtypes
from stepwell.storage.format.shard import PAGE, LeafSpec, ShardLayout, header_bytes, lay_out, parse_header

KINDS = [*dtypes.NATIVE, *dtypes.AS_BYTES]
SPECS = st.lists(
    st.builds(
        LeafSpec,
        st.text("abc/. %", min_size=1, max_size=8),
        st.sampled_from(KINDS),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def image(layout: ShardLayout) -> bytes:
    return layout.header + bytes(i % 251 for i in range(layout.nbytes - len(layout.header)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS)
def test_a_layout_has_no_gaps_is_aligned_and_is_read_back(specs: list[LeafSpec]) -> None:
    layout = lay_out(specs)
    assert len(layout.header) % PAGE == 0
    position = len(layout.header)
    for placed in layout.placements:
        assert placed.start == position
        assert placed.start % dtypes.itemsize(placed.spec.dtype) == 0
        position = placed.end
    assert position == layout.nbytes
    assert header_bytes(layout.header[:8], layout.nbytes, path="x") == len(layout.header)
    found = parse_header(layout.header, layout.nbytes, path="x")
    expected = {p.spec.name: (*dtypes.stored_as(p.spec.dtype, p.spec.shape), p.start, p.end) for p in layout.placements}
    assert found == expected


def test_the_order_depends_on_element_size_and_the_order_given() -> None:
    layout = lay_out([LeafSpec("b", "uint8", (3,)), LeafSpec("c", "float64", ()), LeafSpec("a", "uint8", (1,))])
    assert [placed.spec.name for placed in layout.placements] == ["c", "b", "a"]


def test_two_leaves_of_one_name_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="two leaves"):
        lay_out([LeafSpec("a", "uint8", ()), LeafSpec("a", "int8", ())])


def test_a_header_of_several_pages(tmp_path: Path) -> None:
    layout = lay_out([LeafSpec(f"layer.{i}.weight", "float32", (2,)) for i in range(200)])
    assert len(layout.header) > 2 * PAGE
    path = tmp_path / "x.safetensors"
    path.write_bytes(image(layout))
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 200


def test_a_shard_without_leaves_opens(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(lay_out([]).header)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []


def edited(change: Any) -> tuple[bytes, int]:
    """A valid two-leaf shard with its header changed."""
    layout = lay_out([LeafSpec("a", "float32", (2,)), LeafSpec("b", "uint8", (3,))])
    document = json.loads(layout.header[8:])
    change(document)
    text = json.dumps(document).encode().ljust(len(layout.header) - 8)
    return struct.pack("<Q", len(text)) + text, layout.nbytes


BAD_HEADERS: dict[str, Any] = {
    "overlap": lambda d: d["b"].update(data_offsets=[4, 7]),
    "gap": lambda d: d["b"].update(data_offsets=[9, 12]),
    "past the end": lambda d: d["b"].update(data_offsets=[8, 4000], shape=[3992]),
    "too short": lambda d: d.pop("b"),
    "negative": lambda d: d["a"].update(data_offsets=[-4, 4]),
    "negative shape": lambda d: d["a"].update(shape=[-2]),
    "shape overflows": lambda d: d["a"].update(shape=[1 << 40, 1 << 40]),
    "unknown type": lambda d: d["a"].update(dtype="F7"),
    "type is a list": lambda d: d["a"].update(dtype=["F32"]),
    "no shape": lambda d: d["a"].pop("shape"),
    "float offsets": lambda d: d["a"].update(data_offsets=[0.0, 8.0]),
    "three offsets": lambda d: d["a"].update(data_offsets=[0, 8, 9]),
    "entry is text": lambda d: d.update(a="x"),
}


@pytest.mark.parametrize("name", BAD_HEADERS, ids=lambda name: name.replace(" ", "_"))
def test_a_header_that_lies_is_damage(name: str) -> None:
    header, nbytes = edited(BAD_HEADERS[name])
    with pytest.raises(DamagedError, match=r"^shard: "):
        parse_header(header, nbytes, path="shard")


def test_control_the_unchanged_header_is_fine() -> None:
    header, nbytes = edited(lambda document: None)
    assert parse_header(header, nbytes, path="shard").keys() == {"a", "b"}


@pytest.mark.parametrize("length", [5000, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_length_is_found_before_anything_is_allocated(length: int) -> None:
    with pytest.raises(DamagedError, match="header claims"):
        header_bytes(struct.pack("<Q", length), 4096, path="shard")
