"""A walk coded on the host and on a device: everything that leaves the device has the same bytes. No zstd here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stepwell.storage.chain import apply_on_device, replay
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs import parts
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange, as_bytes
from stepwell.storage.codecs.codec_spec import LC, Spec, Ternary, Uniform
from stepwell.storage.codecs.coding_groups import SAME
from stepwell.storage.codecs.parts import Memory, is_thinned, make_symbols
from stepwell.storage.codecs.signature import part_digest, signature
from stepwell.storage.codecs.sparse import thin
from tests.storage.codecs.walks import Arrays

if TYPE_CHECKING:
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

SPECS = [LC(bits=3), LC(bits=2), LC(bits=3, scope="global", entropy="huffman"), Ternary(), Uniform(1.0)]
LEAVES = [
    CodedLeaf("row", "float32", (5001,), "parameter"),
    CodedLeaf("odd", "float32", (7, 991), "parameter"),
    CodedLeaf("empty", "float32", (0, 3), "parameter"),
    CodedLeaf("one", "float32", (), "parameter"),
    CodedLeaf("v", "float32", (50,), "moment2"),
    CodedLeaf("rows", "float32", (17001,), "parameter"),
    CodedLeaf("tiny", "float32", (33,), "parameter"),
    CodedLeaf("steps", "int64", (1,), "value"),
    CodedLeaf("still", "float32", (4500,), "parameter"),
]
BAD = {4: ("odd", np.nan), 7: ("rows", np.inf), 9: ("tiny", -np.inf), 11: ("row", 3e38), 12: ("row", -3e38)}
"""By number of the record: values that cannot be coded, or lead to differences that cannot."""


def walk(leaves: Sequence[CodedLeaf] = LEAVES, seed: int = 0) -> Iterator[Arrays]:
    """Weights drift by steps of many sizes; some are stuck, subnormal or of the wrong sign of zero, some are not finite
    for a while.
    """
    rng = np.random.default_rng(seed)
    state: Arrays = {leaf.name: rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves}
    state["steps"] = np.zeros(1, np.int64)
    for leaf in leaves[:2]:
        state[leaf.name].reshape(-1)[:64:2] = np.float32(-0.0)
        state[leaf.name].reshape(-1)[1:64:2] = np.float32(1e-40)
    number = 0
    while True:
        shown = {name: np.array(value) for name, value in state.items()}
        if number in BAD and BAD[number][0] in shown:
            shown[BAD[number][0]].reshape(-1)[5] = BAD[number][1]
        yield shown
        number += 1
        for leaf in leaves:
            if leaf.dtype == "float32" and leaf.name != "still":
                scale = np.exp(2 * rng.standard_normal(leaf.shape)) * (30.0 if number == 15 else 1e-3)
                state[leaf.name] = state[leaf.name] + (rng.standard_normal(leaf.shape) * scale).astype(np.float32)
        state["v"] = np.abs(state["v"]) if "v" in state else np.ones(1, np.float32)
        state["steps"] = state["steps"] + 1
        if number > 13 and "still" in state:
            state["still"] = state["still"] + np.float32(1e-3)


class Twins:
    """A writer on the host and one on a device. Tensors stay where they are, as those of a network do."""

    def __init__(
        self, spec: Spec, device: str, leaves: Sequence[CodedLeaf] = LEAVES, states: Iterator[Arrays] | None = None
    ) -> None:
        from stepwell.storage.codecs.device.device_coder import DeviceCoder

        self.deltas = Deltas(parameters=spec, small="pool", skip_every=6)
        self.leaves, self.states, self.device = leaves, states or walk(leaves), device
        self.base = next(self.states)
        parts = arrange(leaves, self.deltas)
        self.number = next(number for number, part in enumerate(parts) if part.spec == spec)
        self.part = parts[self.number]
        self.image, self.memory = ChainImage([self.part]), Memory()
        self.image.fill([self.pieces(self.base)])
        self.tensors = self.upload(self.base)
        self.coder: DeviceCoder = DeviceCoder.start(self.part, self.tensors, skip=self.deltas.skip)
        self.exact = self.reused = self.same = self.sparse = 0

    def pieces(self, state: Arrays) -> list[NDArray[np.float32]]:
        return [state[slot.leaf.name].reshape(-1) for slot in self.part.slots]

    def upload(self, state: Arrays) -> list[torch.Tensor]:
        return [torch.from_numpy(state[slot.leaf.name].copy()).to(self.device) for slot in self.part.slots]

    def code_on_device(self, state: Arrays, *, is_skip: bool) -> Given:
        for tensor, value in zip(self.tensors, self.upload(state), strict=True):
            tensor.copy_(value)
        if is_skip:
            self.coder.reset(self.upload(self.base))
        self.coder.encode(self.tensors, is_skip=is_skip)
        self.coder.guard()
        for tensor in self.tensors:  # training goes on
            tensor.fill_(7)
        return self.coder.finish()

    def send(self, *, is_skip: bool = False) -> None:
        """One record each: all that leaves the device is as on the host."""
        state, part = next(self.states), self.part.for_skip(self.deltas.skip) if is_skip else self.part
        if is_skip:
            self.image.fill([self.pieces(self.base)])
            self.memory = Memory()
        expected = make_symbols(part, self.pieces(state), self.image.arrays[0], self.memory, reuse=not is_skip)
        if is_skip:
            self.memory = Memory()
        given = self.code_on_device(state, is_skip=is_skip)
        found = given.coded
        assert found.heads == expected.heads and found.facts == expected.facts
        assert found.is_same == expected.is_same and found.exact == expected.exact
        packed = np.concatenate([np.empty(0, np.uint8), *expected.packed])
        sparse = thin(packed) if is_thinned(part.spec) else None
        if sparse is None:
            assert found.sparse is None and b"".join(line.tobytes() for line in found.packed) == packed.tobytes()
        else:
            assert found.sparse is not None and not found.packed and found.sparse.nbytes == packed.size
            assert found.sparse.marks.tobytes() == sparse.marks.tobytes()
            assert found.sparse.values.tobytes() == sparse.values.tobytes()
        self.sparse += sparse is not None
        array = self.image.arrays[0]
        assert self.coder.reference.cpu().numpy().tobytes() == array.tobytes()
        assert given.digest == part_digest(array.nbytes, signature(as_bytes(array)))
        self.exact, self.reused = self.exact + found.facts.exact, self.reused + found.facts.reused
        self.same += found.heads[0] == SAME or found.heads[-1] == SAME


def check_same_symbols(spec: Spec, device: str, records: int = 20, leaves: Sequence[CodedLeaf] = LEAVES) -> Twins:
    """Over a random walk with everything that can happen."""
    twins = Twins(spec, device, leaves)
    for number in range(records):
        twins.send(is_skip=number > 0 and number % twins.deltas.skip_every == 0)
    return twins


def check_found_in_the_second_pass(device: str) -> None:
    """What cannot be coded and meets a table of the record before: the reference is put right on the device."""
    twins = Twins(LC(bits=3), device)
    states = walk()
    line = [next(states) for _ in range(5)]
    line[4]["rows"].reshape(-1)[17] = np.nan
    twins.states = iter(line[1:])
    for _ in range(4):
        twins.send()
    assert twins.exact >= 1 and twins.reused >= 1


def check_odd_differences(spec: Spec, device: str) -> None:
    """Keys that are few, far apart, of one sign, or of one value each; and groups that have nothing but zeros."""
    leaves = [CodedLeaf(name, "float32", (count,), "parameter") for name, count in (("a", 40_000), ("b", 4500))]
    place = np.arange(44_500)
    signs = np.where(place % 3, 1.0, -1.0)
    far = np.ldexp(signs, place % 200 - 130)
    few = np.where(place % 20_000 == 7, np.ldexp(signs, place % 11 * 9), np.ldexp(signs, -60))
    steps = signs * 1e-3 * (1 + place % 3)
    above = np.where(place == 9000, 1e30, np.abs(steps))
    tiny = np.where(place < 40_000, 1e-40, 0.0)
    for line in (far, few, steps, above, tiny, np.where(place == 44_000, -1.0, 0.0)):
        values = line.astype(np.float32)
        states: list[Arrays] = [{"a": each[:40_000], "b": each[40_000:]} for each in (np.zeros_like(values), values)]
        Twins(spec, device, leaves, iter(states)).send()


def check_records_are_applied(spec: Spec, device: str, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bits of the host: all that can happen to a group, skip records, symbols thinned out or not."""
    monkeypatch.setattr(parts, "_SHARED_NBYTES", 1)
    monkeypatch.setattr(parts, "all_threads", lambda: 3)
    monkeypatch.setattr(apply_on_device, "_STRETCH", 800)
    monkeypatch.setattr(apply_on_device, "_AHEAD_NBYTES", 40_000)
    states, tried, used = walk(), [], []
    deltas = Deltas(parameters=spec, small="pool", skip_every=9)
    with ChainWriter.start(where / "chain", LEAVES, next(states), step=0, deltas=deltas) as chain:
        known = [chain.state()]
        for step in range(1, 18):
            chain.append(step, next(states))
            known.append(chain.state())
    real = apply_on_device.move_on

    def note(*arguments: Any) -> None:
        tried.append(arguments)
        real(*arguments)
        used.append(arguments[4])

    monkeypatch.setattr(apply_on_device, "move_on", note)
    for until in (1, 5, 8, 12, 17):
        monkeypatch.setattr(replay, "_device", lambda about: torch.device(device))
        found = replay.restore(where / "chain", until=until)
        monkeypatch.setattr(replay, "_device", lambda about: None)
        expected = replay.restore(where / "chain", until=until)
        assert found.number == expected.number == until and found.stopped is None
        for name, value in expected.leaves.items():
            assert found.leaves[name].tobytes() == value.tobytes() == known[until][name].tobytes(), name
    assert used and len(used) == len(tried) and {each.type for each in used} == {device}
