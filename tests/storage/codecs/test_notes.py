"""Notes that travel with records, and parts that records have nothing of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from stepwell.errors import ConfigError, DamagedError, StateError
from stepwell.storage.chain import chain_record
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head, body_digest
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.chain.segment import segment_name
from stepwell.storage.codecs import zstd_frames
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, choose
from stepwell.storage.codecs.codec_spec import LC, Hold, Raw
from tests.storage.codecs.walks import LEAVES, fill, walk

HELD = Deltas(first_moments=Hold(), second_moments=Hold(), small="pool", skip_every=3)


def test_a_note_comes_back_with_its_record(tmp_path: Path) -> None:
    states = walk()
    notes = [b"", *(json.dumps(list(range(1000 * number))).encode() for number in (1, 30)), b"", b"\0" * 70]
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=0, deltas=Deltas(skip_every=3)) as chain:
        for number in range(1, len(notes)):
            chain.append(number, next(states), note=notes[number])
    for number, note in enumerate(notes):
        assert restore(tmp_path / "chain", until=number).note == note
    assert (tmp_path / "chain" / segment_name(1)).stat().st_size < 10**5, "notes are compressed"


def test_a_note_that_is_too_long_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_record, "MOST_NOTE_BYTES", 100)
    states = walk()
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=0, deltas=Deltas()) as chain:
        with pytest.raises(ConfigError, match="101 bytes; at most 100"):
            chain.append(1, next(states), note=bytes(101))
        chain.append(1, next(states), note=bytes(100))
    assert restore(tmp_path / "chain").note == bytes(100)
    monkeypatch.setattr(chain_record, "MOST_NOTE_BYTES", 99)
    assert restore(tmp_path / "chain").number == 0


def with_note(path: Path, section: bytes) -> None:
    """Put another note into the only record of a segment, with checksums that are right."""
    data = path.read_bytes()
    head = Head.load(data[:HEAD_NBYTES], path="")
    sections = chain_record.cut(memoryview(data[HEAD_NBYTES:]), head.parts + 1)
    body = b"".join(chain_record.join([[bytes(each)] for each in (*sections[:-1], section)]))
    forged = Head(**{**head.__dict__, "body_nbytes": len(body), "body_digest": body_digest(body)})
    path.write_bytes(forged.dump() + body)


def test_a_damaged_note_is_a_damaged_record(tmp_path: Path) -> None:
    states, note = walk(), zstandard.compress(bytes(range(256)) * 40, 3)
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=0, deltas=Deltas()) as chain:
        chain.append(1, next(states), note=b"x")
    path = tmp_path / "chain" / segment_name(1)
    with_note(path, note)
    assert restore(tmp_path / "chain").note == bytes(range(256)) * 40
    for broken in (b"x", note[:-1], note[:4], note[:4] + b"\xff" * 20):
        with_note(path, broken)
        found = restore(tmp_path / "chain")
        assert found.number == 0 and found.note == b"" and "a frame" in str(found.stopped)


def test_no_room_is_made_on_a_frames_word() -> None:
    bomb = zstandard.compress(bytes(1 << 22), 3)
    assert len(bomb) < 1000 and len(zstd_frames.decompress_at_most(bomb, 1 << 22)) == 1 << 22
    with pytest.raises(DamagedError, match="more than"):
        zstd_frames.decompress_at_most(bomb, (1 << 22) - 1)
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj().compress(b"x" * (1 << 18))
    with pytest.raises(DamagedError):
        zstd_frames.decompress_at_most(frame, 1 << 20)


def test_held_leaves_are_those_of_the_base(tmp_path: Path) -> None:
    """They are not needed to append, and come back from the base; before and after a skip record."""
    states = walk()
    base = next(states)
    with ChainWriter.start(tmp_path / "chain", LEAVES, base, step=0, deltas=HELD) as chain:
        for number in range(1, 6):
            state = next(states)
            if number % 2:
                del state["m"], state["v"]
            chain.append(number, state)
            found = restore(tmp_path / "chain")
            assert found.number == number and not found.is_exact
            assert set(chain.state()) == set(base) - {"m", "v"} and set(found.leaves) == set(base)
            for name, value in {**chain.state(), "m": base["m"], "v": base["v"]}.items():
                assert found.leaves[name].tobytes() == value.tobytes(), name
        for broken in ({**state, "new": np.zeros(1)}, {n: v for n, v in state.items() if n != "bias"}):
            with pytest.raises(StateError, match="new base"):
                chain.append(6, broken)


def test_held_leaves_of_a_base_that_is_kept_elsewhere(tmp_path: Path) -> None:
    states = walk()
    base = next(states)
    partly = {name: value for name, value in base.items() if name not in ("m", "v")}
    with ChainWriter.start(tmp_path / "chain", LEAVES, base, step=0, deltas=HELD, base=lambda: partly) as chain:
        for number in range(1, 6):
            chain.append(number, next(states))
    assert restore(tmp_path / "chain", base=fill(base)).number == 5
    for wrong in (partly, {**base, "v": base["m"]}):
        with pytest.raises(DamagedError, match="digest"):
            restore(tmp_path / "chain", base=fill(wrong))


def test_what_may_be_held() -> None:
    with pytest.raises(ConfigError, match="it is for moments"):
        Deltas(parameters=Hold())
    for dtype, expected in (("float32", Hold()), ("bfloat16", Hold()), ("uint8", Raw())):
        assert choose(CodedLeaf("x", dtype, (5000,), "moment2"), HELD) == expected
        assert choose(CodedLeaf("x", dtype, (5000,), "buffer"), HELD) == Raw()


def test_a_codec_alone_stands_for_deltas() -> None:
    assert Deltas.of(LC(bits=2)) == Deltas(parameters=LC(bits=2)) and Deltas.of(HELD) is HELD
    assert Deltas().every == 1 and Deltas(every=5).every == 5
    with pytest.raises(ConfigError, match="every"):
        Deltas(every=0)
