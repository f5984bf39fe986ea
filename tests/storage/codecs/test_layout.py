"""Which leaf gets which codec: the table of roles, element types and sizes."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.errors import ConfigError, StateError
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange, choose
from stepwell.storage.codecs.codec_spec import LC, Raw, Spec, Top, Uniform, XorCodec, Zstd


@pytest.mark.parametrize(
    ("role", "dtype", "count", "expected"),
    [
        ("parameter", "float32", 5000, LC()),
        ("parameter", "float32", 4096, LC()),
        ("parameter", "float32", 4095, Raw()),
        ("parameter", "bfloat16", 5000, XorCodec()),
        ("parameter", "float16", 5000, XorCodec()),
        ("parameter", "float64", 5000, XorCodec()),
        ("parameter", "int8", 5000, Raw()),
        ("moment1", "float32", 5000, Top(0)),
        ("moment1", "float32", 3, Top(0)),
        ("moment1", "bfloat16", 5000, XorCodec()),
        ("moment2", "float32", 5000, Top(3)),
        ("moment2", "float64", 5000, XorCodec()),
        ("optimizer", "float32", 5000, Raw()),
        ("buffer", "float32", 5000, Raw()),
        ("value", "float32", 5000, Raw()),
        ("rng", "uint8", 5000, Raw()),
        ("what this will be", "float32", 5000, Raw()),
        ("value", "bool", 5000, Raw()),
    ],
)
def test_defaults(role: str, dtype: str, count: int, expected: Spec) -> None:
    assert choose(CodedLeaf("x", dtype, (count,), role), Deltas()) == expected


def test_small_ones_are_exact_or_share_a_table() -> None:
    leaves = [
        CodedLeaf(name, "float32", (count,), "parameter")
        for name, count in [("a", 9000), ("b", 10), ("c", 8000), ("d", 20)]
    ]
    exact = arrange(leaves, Deltas())
    assert [(part.spec, [slot.leaf.name for slot in part.slots]) for part in exact] == [
        (LC(), ["a", "c"]), (Raw(), ["b", "d"])
    ]  # fmt: skip
    (pooled,) = arrange(leaves, Deltas(small="pool"))
    assert [[slot.leaf.name for slot in group] for group in pooled.groups()] == [["a"], ["b", "d"], ["c"]]
    (together,) = arrange(leaves, Deltas(parameters=LC(scope="global"), small="pool"))
    assert len(together.groups()) == 1
    assert arrange(leaves, Deltas(parameters=Zstd()))[0].spec == Zstd(), "an exact code needs no exception"


def test_a_skip_record_keeps_the_places() -> None:
    leaves = [CodedLeaf("a", "float32", (9000,), "parameter"), CodedLeaf("v", "float32", (9000,), "moment2")]
    parts = arrange(leaves, Deltas())
    skipped = [part.for_skip(Uniform(0.25)) for part in parts]
    assert [part.spec for part in skipped] == [Uniform(0.25), Top(3)]
    assert [part.slots for part in skipped] == [part.slots for part in parts]


def test_what_does_not_fit_is_refused() -> None:
    leaf = CodedLeaf("a", "float32", (3, 4), "parameter")
    with pytest.raises(ConfigError, match="share a name"):
        arrange([leaf, leaf], Deltas())
    with pytest.raises(StateError, match="unknown element type"):
        arrange([CodedLeaf("a", "float33", (3,), "parameter")], Deltas())
    image = ChainImage(arrange([leaf], Deltas(small="pool")))
    for state in ({}, {"b": np.zeros((3, 4), np.float32)}, {"a": np.zeros((3, 5), np.float32)},
                  {"a": np.zeros(6, np.float64)}, {"a": np.zeros(12, np.float32), "b": np.zeros(1)}):  # fmt: skip
        with pytest.raises(StateError, match="new base"):
            image.split(state)
