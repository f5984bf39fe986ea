"""States that change from step to step, the chains made of them, and the checks that controls break on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import Fill, Restored, restore
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange, as_bytes
from stepwell.storage.codecs.codec_spec import LC, Spec
from stepwell.storage.codecs.histogram import Piece, measure
from stepwell.storage.codecs.parts import Memory, apply, code, read
from stepwell.storage.codecs.tables import BucketTable, make_table

Arrays = dict[str, NDArray[Any]]
LEAVES = (
    CodedLeaf("weight", "float32", (60, 100), "parameter"),
    CodedLeaf("bias", "float32", (60,), "parameter"),
    CodedLeaf("half", "bfloat16", (33,), "parameter"),
    CodedLeaf("m", "float32", (60, 100), "moment1"),
    CodedLeaf("v", "float32", (60, 100), "moment2"),
    CodedLeaf("scalar", "float32", (), "optimizer"),
    CodedLeaf("nothing", "float32", (0, 3), "buffer"),
    CodedLeaf("steps", "int64", (1,), "value"),
)


def walk(seed: int = 0) -> Iterator[Arrays]:
    """A training run without the training: weights drift, moments follow, counters count."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    state: Arrays = {
        "weight": draw(60, 100), "bias": draw(60), "half": np.arange(33, dtype=np.uint16), "m": draw(60, 100),
        "v": draw(60, 100) ** 2, "scalar": np.float32(1) * draw(), "nothing": draw(0, 3),
        "steps": np.zeros(1, np.int64),
    }  # fmt: skip
    scale = np.exp(draw(60, 100)) * np.float32(1e-3)
    while True:
        yield {name: np.array(value) for name, value in state.items()}
        gradient = draw(60, 100)
        state["m"] = np.float32(0.9) * state["m"] + np.float32(0.1) * gradient
        state["v"] = np.float32(0.999) * state["v"] + np.float32(0.001) * gradient**2
        state["weight"] = state["weight"] + scale * state["m"]
        state["bias"] = state["bias"] + draw(60) * np.float32(0.01)
        state["half"] = state["half"] + rng.integers(0, 2, 33).astype(np.uint16)
        state["steps"] = state["steps"] + 1


def write(directory: Path, records: int, deltas: Deltas, seed: int = 0) -> list[Arrays]:
    """A chain of so many records. Returns what the writer says a reader has, after the base and after each record."""
    states = walk(seed)
    with ChainWriter.start(directory, LEAVES, next(states), step=10, deltas=deltas) as chain:
        known = [chain.state()]
        for number in range(1, records + 1):
            chain.append(10 + number, next(states))
            known.append(chain.state())
    return known


def fill(state: Arrays) -> Fill:
    """Of a base that is kept elsewhere. What is missing in it stays as it is."""

    def put(leaves: Arrays) -> None:
        for name in leaves.keys() & state.keys():
            as_bytes(leaves[name].reshape(-1))[:] = as_bytes(state[name].reshape(-1))

    return put


def assert_is(restored: Restored, number: int, known: list[Arrays]) -> None:
    """It is the state after that record, bit for bit."""
    assert restored.number == number and restored.step == 10 + number
    assert set(restored.leaves) == set(known[number])
    for name, value in known[number].items():
        assert value.tobytes() == restored.leaves[name].tobytes(), name


class Pair:
    """A writer and a reader of one leaf of parameters, without files."""

    def __init__(self, spec: Spec, base: NDArray[np.float32], *, reuse: bool = False) -> None:
        self.leaf = CodedLeaf("x", "float32", base.shape, "parameter")
        parts = arrange([self.leaf], Deltas(parameters=spec, small="pool"))
        self.part, self.reuse = parts[0], reuse
        self.images = [ChainImage(parts), ChainImage(parts)]
        self.memories = [Memory(), Memory()]
        for image in self.images:
            image.fill(image.split({"x": base}))

    def send(self, value: NDArray[np.float32]) -> bytes:
        """One record. Writer and reader have the same bits after it."""
        (pieces,) = self.images[0].split({"x": value})
        section, self.facts = code(self.part, pieces, self.images[0].arrays[0], self.memories[0], reuse=self.reuse)
        data = b"".join(section)
        apply(self.part, [read(self.part, memoryview(data), self.memories[1])], self.images[1].arrays[0])
        assert self.images[0].digest() == self.images[1].digest()
        return data

    @property
    def state(self) -> NDArray[np.float32]:
        return np.asarray(self.images[1].leaves()["x"])


# Checks that a mutation of the code must fail


def check_small_steps_arrive() -> None:
    """Error feedback: steps far below what is sent add up until they are sent; the error stays bounded."""
    base = np.ones(2000, np.float32)
    # Two bits keep three of these four buckets, and the last ten entries are 16 times below the smaller ones.
    kinds = [(800, 1e-3), (800, -1e-3), (300, 2.5e-4), (90, -2.5e-4), (10, 2.0**-16)]
    steps = np.concatenate([np.full(count, step, np.float32) for count, step in kinds])
    value, pair = base.copy(), Pair(LC(bits=2), base)
    first_seen = None
    for number in range(1, 141):
        value = value + steps
        pair.send(value)
        if first_seen is None and (pair.state[-10:] != 1).all():
            first_seen = number
        # What is missing is no more than a few of the largest steps, however long the chain.
        assert np.abs(value - pair.state).max() <= 4e-3, number
    # When they have come together to 2^-9 they are in the largest bucket there is.
    assert first_seen is not None and first_seen <= 128


def check_nan_does_no_harm() -> None:
    """A value that is not finite is stored as it is, flagged, and gone with the next finite state."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal(5000).astype(np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        pair = Pair(LC(bits=3), value)
        hurt = value + np.float32(0.5)
        hurt[7] = bad
        pair.send(hurt)
        assert pair.facts.exact == 1 and pair.state.tobytes() == hurt.tobytes()
        pair.send(value)
        assert np.isfinite(pair.state).all() and pair.state.tobytes() == value.tobytes()
        pair.send(value + np.float32(0.25))
        assert pair.facts.exact == 0 and np.abs(pair.state - value - 0.25).max() < 0.01


def reference_table(delta: NDArray[np.float32], bits: int) -> list[tuple[int, float]]:
    """The paper's rule by brute force: (key, representative) of the buckets that are kept, in order."""
    buckets: dict[int, list[float]] = {}
    for x in delta:
        key = int(x.view(np.uint32)) >> 23
        if key & 255:
            buckets.setdefault(key, []).append(float(x))
    order = sorted(buckets, key=lambda key: (-(key & 255), -len(buckets[key]), key))
    return [(key, _middle(buckets[key])) for key in order[: 2**bits - 1]]


def _middle(members: list[float]) -> float:
    """Halfway between smallest and largest, to eight significant bits (ties to even)."""
    middle = float(np.float32(np.float32(min(members)) / np.float32(2) + np.float32(max(members)) / np.float32(2)))
    fraction, exponent = np.frexp(middle)
    rounded = float(np.ldexp(np.rint(fraction * 256) / 256, exponent))
    most = float(np.ldexp(255 / 256, 128))
    return max(-most, min(most, rounded))


def check_table_is_the_papers(delta: NDArray[np.float32], bits: int) -> None:
    """Which buckets are kept, and what stands for them."""
    pieces: list[Piece] = [(delta, np.zeros_like(delta))]
    table = make_table(LC(bits=bits), measure(pieces, 2**bits - 1))
    assert isinstance(table, BucketTable)
    found = [(key, float(value)) for key, value in zip(table.keys, table.values[1:], strict=True)]
    assert found == reference_table(delta, bits)


__all__ = [
    "LEAVES", "Pair", "assert_is", "check_nan_does_no_harm", "check_small_steps_arrive", "check_table_is_the_papers",
    "reference_table", "restore", "walk", "write",
]  # fmt: skip
