"""On CUDA: what the device quantises has the bytes of what the host quantises."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from stepwell.errors import RoomError
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import LC, Spec, Uniform
from tests.storage.codecs.device_walks import (
    LEAVES,
    SPECS,
    check_found_in_the_second_pass,
    check_odd_differences,
    check_records_are_applied,
    check_same_symbols,
)

pytestmark = pytest.mark.gpu
BIG = [
    dataclasses.replace(leaf, shape=({"row": 1 << 20, "rows": 700_001}.get(leaf.name, leaf.count),)) for leaf in LEAVES
]
ALIGNED = [
    CodedLeaf(name, "float32", (count,), "parameter") for name, count in (("a", 1 << 21), ("b", 999_936), ("c", 4096))
]


@pytest.mark.parametrize("leaves", [LEAVES, BIG, ALIGNED], ids=["small", "big", "aligned"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_symbols_are_those_of_the_host(spec: Spec, leaves: list[CodedLeaf]) -> None:
    twins = check_same_symbols(spec, "cuda", leaves=leaves)
    assert twins.reused >= 3 and twins.coder._used.align == (16 if leaves is ALIGNED else 1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_odd_differences(spec: Spec) -> None:
    check_odd_differences(spec, "cuda")


def test_what_cannot_be_coded_is_found_in_the_second_pass_too() -> None:
    check_found_in_the_second_pass("cuda")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_records_are_applied_to_the_same_bits(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_records_are_applied(spec, "cuda", tmp_path, monkeypatch)


def test_without_room_for_the_reference_the_caller_is_told() -> None:
    (part,) = arrange([CodedLeaf("a", "float32", (1 << 40,), "parameter")], Deltas())
    with pytest.raises(RoomError, match="on the host"):
        _start(part)


def _start(part: object) -> None:
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

    DeviceCoder.start(part, [torch.zeros(1, device="cuda")], skip=Uniform(0.25))  # type: ignore[arg-type]


def test_launches_do_not_grow_with_the_leaves() -> None:
    """Counted by the profiler, of a record whose tables are known."""
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

    counts = []
    for leaves in (4, 200):  # so many that symbols are thinned out
        names = [CodedLeaf(str(i), "float32", (4096,), "parameter") for i in range(leaves)]
        (part,) = arrange(names, Deltas(parameters=LC(bits=3)))
        tensors = [torch.randn(4096, device="cuda") for _ in names]
        coder = DeviceCoder.start(part, tensors, skip=Uniform(0.25))
        for _ in range(2):
            for tensor in tensors:
                tensor.add_(torch.randn_like(tensor), alpha=1e-3)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                coder.encode(tensors)
                coder.finish()
                torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[1] <= counts[0] + 4
