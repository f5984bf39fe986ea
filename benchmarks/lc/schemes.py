"""The schemes that are compared: our chains as they lie on disk, and SCAR and TOPN from their definitions.

SCAR (Qiao et al., ICML 2019): the checkpoint is what was saved last of each block; each time the blocks farthest from
their saved values are saved whole. TOPN: the entries with the largest differences are saved, as they are, and the
differences are taken to what was saved, as in LC-Checkpoint. TOPN is charged twice: for values alone, as the slides of
the paper may mean it, and with a 32-bit index for each entry, as a file needs it (`rework.with_indices`): then half as
many entries have the same size. An index for each block of SCAR is a 64th, and always charged.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import Spec, parse

State = dict[str, np.ndarray]
BLOCK = 64


@dataclass(frozen=True)
class Outcome:
    """state: what is restored after the last checkpoint. share: bytes of a checkpoint against those of the parameters,
    mean over the chain.
    """

    state: State
    share: float


def run(scheme: str, states: list[State]) -> Outcome:
    """Follow a trajectory from its base, which is exact, with one checkpoint a state; with FULL n one of the whole at
    every n-th, and the failure in the middle between two.
    """
    name, _, value = scheme.partition(" ")
    if name == "SCAR":
        return scar(states, float(value) / 100)
    if name == "FULL":
        return Outcome(states[-1 - int(value) // 2], 1 / int(value))
    if name == "TOPN":
        return topn(states, float(value) / 100)
    return chain(parse(scheme), states)


def chain(spec: Spec, states: list[State]) -> Outcome:
    """Records of ours, written to files and read back. The head of a record is part of its size."""
    base, *others = states
    leaves = [CodedLeaf(name, "float32", value.shape, "parameter") for name, value in base.items()]
    deltas = Deltas(parameters=spec, small="pool", skip_every=0, reuse_tables=False)
    with tempfile.TemporaryDirectory() as folder:
        with ChainWriter.start(Path(folder) / "chain", leaves, base, step=0, deltas=deltas) as writer:
            nbytes = [writer.append(number, state).nbytes for number, state in enumerate(others, 1)]
        found = restore(Path(folder) / "chain")
    assert found.number == len(others) and found.stopped is None
    return Outcome(dict(found.leaves), float(np.mean(nbytes)) / _nbytes(base))


def topn(states: list[State], share: float) -> Outcome:
    """Keep the largest differences exactly: this share of the entries, charged for their values alone."""
    base, *others = states
    saved = _flat(base)
    count = max(1, round(saved.size * share))
    for state in others:
        delta = _flat(state) - saved
        chosen = np.argpartition(np.abs(delta), -count)[-count:]
        saved[chosen] += delta[chosen]
    return Outcome(_shaped(saved, base), count / saved.size)


def scar(states: list[State], share: float) -> Outcome:
    """Save the blocks that are farthest from what was saved of them."""
    base, *others = states
    saved = _flat(base)
    blocks = -(-saved.size // BLOCK)
    count = max(1, round(blocks * share))
    for state in others:
        now = _flat(state)
        padded = np.zeros(blocks * BLOCK, np.float32)
        padded[: now.size] = now - saved
        far = np.square(padded.reshape(blocks, BLOCK)).sum(1)
        for block in np.argpartition(far, -count)[-count:]:
            saved[block * BLOCK : (block + 1) * BLOCK] = now[block * BLOCK : (block + 1) * BLOCK]
    return Outcome(_shaped(saved, base), count * (BLOCK * 4 + 4) / (saved.size * 4))


def lose(truth: State, restored: State, part: float, seed: int) -> State:
    """Only this part of the blocks is lost, at random: the others stay as they are (SCAR's partial recovery)."""
    line, blocks = _flat(truth), -(-_flat(truth).size // BLOCK)
    lost = np.zeros(blocks, np.bool_)
    lost[np.random.default_rng(seed).permutation(blocks)[: round(part * blocks)]] = True
    return _shaped(np.where(np.repeat(lost, BLOCK)[: line.size], _flat(restored), line), truth)


def _nbytes(state: State) -> int:
    return sum(value.nbytes for value in state.values())


def _flat(state: State) -> np.ndarray:
    return np.concatenate([value.reshape(-1) for value in state.values()])


def _shaped(line: np.ndarray, like: State) -> State:
    found, start = {}, 0
    for name, value in like.items():
        found[name] = line[start : start + value.size].reshape(value.shape).copy()
        start += value.size
    return found
