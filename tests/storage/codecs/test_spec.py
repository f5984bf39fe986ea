"""Codecs by name: what is written is read, what makes no sense is refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.storage.codecs.assignment import Deltas
from stepwell.storage.codecs.codec_spec import (
    LC,
    REGISTRY,
    Hold,
    Raw,
    Spec,
    Ternary,
    Top,
    Uniform,
    XorCodec,
    Zstd,
    parse,
)

SPECS = st.one_of(
    st.sampled_from([Raw(), Hold()]),
    st.builds(Zstd, st.integers(1, 19)),
    st.builds(XorCodec, st.integers(1, 19)),
    st.builds(Top, st.integers(0, 7)),
    st.builds(LC, st.integers(2, 3), st.sampled_from(["tensor", "global"]), st.sampled_from(["zstd", "huffman"])),
    st.builds(Ternary, st.floats(0.1, 8), st.sampled_from(["tensor", "global"])),
    st.builds(Uniform, st.floats(0.01, 8), st.sampled_from(["tensor", "global"])),
)


@given(SPECS)
def test_a_text_says_all(spec: Spec) -> None:
    assert parse(spec.text) == spec


def test_the_registry_is_what_the_issue_lists() -> None:
    assert list(REGISTRY) == ["raw", "zstd", "xor", "hold", "top", "lc", "ternary", "uniform"]
    assert {name for name, kind in REGISTRY.items() if kind.is_exact} == {"raw", "zstd", "xor"}
    assert parse("lc") == LC() and parse("lc(bits=2)") == LC(bits=2)
    assert parse("lc(bits=2, entropy=huffman)") == LC(bits=2, entropy="huffman")


@pytest.mark.parametrize(
    "text",
    ["", "gzip", "lc(", "lc(bits=4)", "lc(bits=x)", "lc(bit=3)", "lc(scope=layer)", "lc(bits=2,bits=3)",
     "uniform(step=0)", "uniform(step=nan)", "ternary(threshold=inf)", "top(mantissa=8)", "zstd(level=0)", "raw(x=1)"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


@pytest.mark.parametrize("spec", [LC(), Ternary(), Uniform()])
def test_second_moments_never_get_a_code_with_zeros(spec: Spec) -> None:
    with pytest.raises(ConfigError, match="blows training up"):
        Deltas(second_moments=spec)


def test_an_exact_skip_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="new base"):
        Deltas(skip=Zstd())
