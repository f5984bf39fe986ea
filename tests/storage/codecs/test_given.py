"""Parts that come coded: the chain is the same, and who gives the wrong ones is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepwell.errors import ConfigError
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs import precoded as given
from stepwell.storage.codecs.assignment import Deltas, arrange, as_bytes
from stepwell.storage.codecs.codec_spec import LC, Spec, Ternary, Uniform
from stepwell.storage.codecs.coding_groups import AGAIN, EXACT, FRESH, SAME, group_nbytes
from stepwell.storage.codecs.parts import Memory, make_symbols, seal
from stepwell.storage.codecs.signature import part_digest, signature
from stepwell.storage.codecs.sparse import thin
from stepwell.storage.codecs.tables import stored_bits
from tests.storage.codecs import device_walks
from tests.storage.codecs.walks import LEAVES, Arrays, walk

DELTAS = Deltas(small="pool", skip_every=4, keep_segments=9)


class Elsewhere:
    """Codes the parameters of a walk, as a device would."""

    def __init__(self, base: Arrays, parts: tuple) -> None:
        self.number = next(number for number, part in enumerate(parts) if part.spec == LC())
        self.part, self.base = parts[self.number], base
        self.names = {slot.leaf.name for slot in self.part.slots}
        self.image, self.memory = ChainImage([self.part]), Memory()
        self.image.fill([self.pieces(base)])

    def pieces(self, state: Arrays) -> list:
        return [state[slot.leaf.name].reshape(-1) for slot in self.part.slots]

    def code(self, state: Arrays, *, is_skip: bool) -> dict[int, Given]:
        part, array = self.part.for_skip(DELTAS.skip) if is_skip else self.part, self.image.arrays[0]
        if is_skip:
            self.image.fill([self.pieces(self.base)])
        memory = Memory() if is_skip else self.memory
        coded = make_symbols(part, self.pieces(state), array, memory, reuse=not is_skip)
        self.memory = Memory() if is_skip else memory
        return {self.number: Given(coded, part_digest(array.nbytes, signature(as_bytes(array))))}


def test_a_chain_of_given_parts_has_the_same_bytes(tmp_path: Path) -> None:
    states = walk()
    base = next(states)
    with ChainWriter.start(tmp_path / "whole", LEAVES, base, step=0, deltas=DELTAS) as whole:
        coder = Elsewhere(base, whole._document.parts)
        with ChainWriter.start(
            tmp_path / "given", LEAVES, base, step=0, deltas=DELTAS, elsewhere=[coder.number]
        ) as chain:
            for step in range(1, 11):
                state = next(states)
                whole.append(step, state)
                others = {name: value for name, value in state.items() if name not in coder.names}
                done = chain.append(step, others, given=coder.code(state, is_skip=chain.is_skip_next))
                assert done.kind == ("skip" if step in (5, 9) else "delta")
            assert not coder.names & set(chain.state())
            given = coder.code(state, is_skip=False)
            for wrong in ({}, {**given, coder.number + 1: given[coder.number]}):
                with pytest.raises(ConfigError, match="came coded"):
                    chain.append(11, others, given=wrong)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "given" / path.name).read_bytes(), path.name
    assert restore(tmp_path / "given").number == 10


def test_control_a_wrong_digest_of_a_given_part_is_found(tmp_path: Path) -> None:
    states = walk()
    base = next(states)
    with ChainWriter.start(tmp_path / "first", LEAVES, base, step=0, deltas=DELTAS) as chain:
        coder = Elsewhere(base, chain._document.parts)
    with ChainWriter.start(tmp_path / "chain", LEAVES, base, step=0, deltas=DELTAS, elsewhere=[coder.number]) as chain:
        for step in (1, 2):
            state = next(states)
            given = coder.code(state, is_skip=False)
            if step == 2:
                given = {coder.number: Given(given[coder.number].coded, bytes(16))}
            chain.append(step, {n: v for n, v in state.items() if n not in coder.names}, given=given)
    found = restore(tmp_path / "chain")
    assert found.number == 1 and "record 2" in str(found.stopped) and "digest" in str(found.stopped)


@pytest.mark.parametrize("spec", [LC(bits=3), LC(bits=2), Ternary(), Uniform(1.0)], ids=lambda spec: spec.text)
def test_a_part_travels_without_its_symbols(spec: Spec) -> None:
    """Through everything that can happen to a group: unchanged, known tables, values that cannot be coded."""
    (part, *_) = arrange(device_walks.LEAVES, Deltas(parameters=spec, small="pool"))
    bits, image, memory, kinds = stored_bits(spec), ChainImage([part]), Memory(), set()
    states, is_thinned = device_walks.walk(), False
    pieces = lambda state: [state[slot.leaf.name].reshape(-1) for slot in part.slots]  # noqa: E731
    image.fill([pieces(next(states))])
    for _ in range(14):
        coded = make_symbols(part, pieces(next(states)), image.arrays[0], memory, reuse=True)
        symbols, position, lines = np.full(group_nbytes(part.slots, bits), 0xEE, np.uint8), 0, iter(coded.packed)
        for kind, slots in zip(given._kinds(coded.heads), part.groups(), strict=True):
            size = group_nbytes(slots, bits)
            if kind in (FRESH, AGAIN):
                symbols[position : position + size] = next(lines)
            position += size
            kinds.add(kind)
        sent = Given(coded, bytes(range(16)), 0.25, 3.5)
        data = np.frombuffer(given.dump(sent) + b"what was there before", np.uint8)
        found = given.load(part, data, symbols)
        assert (found.digest, found.missing, found.way) == (sent.digest, 0.25, 3.5)
        assert found.coded.facts == coded.facts and found.coded.is_same == coded.is_same
        ways = [coded, found.coded]
        if (sparse := thin(np.concatenate([np.empty(0, np.uint8), *coded.packed]))) is not None:
            thinned = Given(replace(coded, packed=[], sparse=sparse), bytes(16))
            line = np.concatenate([sparse.marks, sparse.values, symbols])
            ways.append(given.load(part, np.frombuffer(given.dump(thinned), np.uint8), line).coded)
            assert ways[-1].sparse is not None and not ways[-1].packed
            is_thinned = True
        sealed = [seal(part, each, Memory(), reuse=False, dictionary_bytes=0) for each in ways]
        assert all(each == sealed[0] for each in sealed)
    assert kinds == {SAME, FRESH, AGAIN, EXACT} and is_thinned
