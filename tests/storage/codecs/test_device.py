"""The device coder by Triton's interpreter, on the host: `make test-triton` installs triton."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from stepwell.errors import ConfigError, RoomError, StateError
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import LC, Spec, Top, Uniform
from stepwell.storage.codecs.device.tiles import lay_out
from stepwell.storage.codecs.signature import COLUMNS, FACTOR
from tests.storage.codecs.device_walks import (
    LEAVES,
    SPECS,
    Twins,
    check_found_in_the_second_pass,
    check_odd_differences,
    check_same_symbols,
)


def why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (make test-triton)"
    return "tests/gpu does the same on CUDA" if torch.cuda.is_available() else None


interpreted = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
if why_not() is None:
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):  # looked at when kernels are made, and when they run
        from stepwell.storage.codecs.device import kernels as _kernels


def widen_pieces(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """What the first pass holds at once; the interpreter's time goes by such pieces, not by entries."""
    for held in (_kernels.COUNT_TOP, _kernels.COUNT_ALL):
        monkeypatch.setitem(held, "PIECE", width)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if why_not() is None:
        widen_pieces(monkeypatch, 1024)
    with np.errstate(all="ignore"):  # it is NumPy that meets the values that are not finite
        yield


@interpreted
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_symbols_are_those_of_the_host(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.storage.codecs.device import kernels

    monkeypatch.setattr(kernels, "WIDTH", 4096)  # the interpreter's time goes by programs, not by entries
    widen_pieces(monkeypatch, 4096)
    twins = check_same_symbols(spec, "cpu")
    assert twins.exact >= 3 and twins.reused >= 3
    assert twins.same >= 3 or "global" in spec.text
    assert 2 <= twins.sparse < 20


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_tiles_of_any_shape(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves that are multiples of 16, for which wide loads are chosen, of several rows of the signature."""
    from stepwell.storage.codecs.device import kernels

    monkeypatch.setattr(kernels, "TILE_ROWS", rows)
    leaves = [
        CodedLeaf(name, "float32", (count,), "parameter") for name, count in (("a", 3 * COLUMNS + 64), ("b", 4096))
    ]
    twins = check_same_symbols(LC(bits=3), "cpu", 4, leaves)
    assert twins.coder._used.align == 16


@interpreted
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_odd_differences(spec: Spec) -> None:
    check_odd_differences(spec, "cpu")


@interpreted
def test_what_cannot_be_coded_is_found_in_the_second_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    check_found_in_the_second_pass("cpu")

    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: None

    from stepwell.storage.codecs.device import kernels

    monkeypatch.setattr(kernels, "settle", Nothing())
    with pytest.raises(AssertionError):
        check_found_in_the_second_pass("cpu")


@interpreted
def test_a_chain_of_given_parts_has_the_same_bytes(tmp_path: Path) -> None:
    twins = Twins(LC(bits=3), "cpu")
    options = {"step": 0, "deltas": twins.deltas}
    ours = {slot.leaf.name for slot in twins.part.slots}
    with (
        ChainWriter.start(tmp_path / "host", LEAVES, twins.base, **options) as host,
        ChainWriter.start(tmp_path / "device", LEAVES, twins.base, **options, elsewhere=[twins.number]) as other,
    ):
        for step in range(1, 10):
            state = next(twins.states)
            others = {name: value for name, value in state.items() if name not in ours}
            given = {twins.number: twins.code_on_device(state, is_skip=other.is_skip_next)}
            expected, found = host.append(step, state), other.append(step, others, given=given)
            assert np.isclose(expected.error, found.error, rtol=1e-6, equal_nan=True)
            about = {"error": 0, "write_seconds": 0}
            assert expected.__dict__ | about == found.__dict__ | about
        with pytest.raises(ConfigError, match="came coded"):
            other.append(10, state)
        with pytest.raises(ConfigError, match="came coded"):
            host.append(10, state, given=given)
    for path in (tmp_path / "host").iterdir():
        assert path.read_bytes() == (tmp_path / "device" / path.name).read_bytes(), path.name
    assert restore(tmp_path / "device").number == 9


@interpreted
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

    (part,) = arrange([CodedLeaf("a", "float32", (5000,), "parameter")], Deltas())
    coder = DeviceCoder.start(part, [torch.zeros(5000)], skip=Uniform(0.25))
    for tensor in (torch.zeros(4999), torch.zeros(5000, dtype=torch.float64), torch.zeros(10000)[::2]):
        with pytest.raises(StateError, match="'a'"):
            coder.encode([tensor])
    (top,) = arrange([CodedLeaf("a", "float32", (5000,), "moment1")], Deltas(first_moments=Top(0)))
    with pytest.raises(ConfigError, match="on the host"):
        DeviceCoder.start(top, [torch.zeros(5000)], skip=Uniform(0.25))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RoomError, match="on the host"):
        DeviceCoder.start(part, [torch.zeros(5000)], skip=Uniform(0.25))


@interpreted
def test_kernels_compile_and_fuse_nothing(tmp_path: Path) -> None:
    """For a GPU, without one. A fused product and sum, or a subnormal taken for zero, would be other bits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.storage.codecs.kernel_builds"]
    done = subprocess.run(
        command,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert done.stdout.count(".visible .entry") == 22
    assert "sub.rn.f32" in done.stdout and ".ftz" not in done.stdout
    assert not re.search(r"\bfma\.|\b(add|sub|mul)\.f32", done.stdout), "without .rn the assembler may fuse them"
    assert "ld.global.v4" in done.stdout or ".v4.b32" in done.stdout, "wide loads where leaves are aligned"


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_entry_is_in_one_tile(bits: int, rows: int) -> None:
    (part,) = arrange([leaf for leaf in LEAVES if leaf.role == "parameter"], Deltas(small="pool"))
    tiles = lay_out(part, bits, 1024, rows)
    seen = [np.zeros(slot.leaf.count, np.int64) for slot in part.slots]
    for leaf, first, height in tiles.table.tolist():
        for row in range(height):
            at = first + row * COLUMNS
            assert at < seen[leaf].size
            seen[leaf][at : at + 1024] += 1
    assert all((line == 1).all() for line in seen)
    spans = [span for _, span in tiles.groups]
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert tiles.powers[:3].tolist() == [pow(FACTOR, power, 1 << 32) for power in (-1, 0, 1)]
    assert len(tiles.powers) == tiles.rows + 1
