"""Chains on disk: what a reader in another process has, skip records, merging, and when a new base is due."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepwell.errors import ConfigError, PersistError, StateError
from stepwell.storage.chain import apply as moving
from stepwell.storage.chain import replay, segment
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.chain.segment import list_segments
from stepwell.storage.codecs import parts
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import LC, Raw, Spec, Ternary, Uniform, Zstd
from stepwell.storage.store import no_follow
from tests.ranks.conftest import soak
from tests.storage.codecs.walks import LEAVES, Arrays, assert_is, fill, walk, write

READER = """
import json, sys
from pathlib import Path
import xxhash
from stepwell.storage.chain.replay import restore
def digest(leaves):
    return {name: xxhash.xxh3_128_hexdigest(value.tobytes()) for name, value in leaves.items()}
found = [restore(Path(sys.argv[1]), until=int(number)) for number in sys.argv[2:]]
assert "torch" not in sys.modules
json.dump([[r.number, r.step, r.stopped, digest(r.leaves)] for r in found], sys.stdout)
"""


@pytest.mark.parametrize(
    "spec",
    [LC(bits=3), soak(LC(bits=2, scope="global", entropy="huffman")), soak(Ternary()), soak(Uniform(1.0))],
    ids=lambda spec: spec.name,
)
def test_200_records_in_a_fresh_process(spec: Spec, tmp_path: Path) -> None:
    import xxhash

    known = write(tmp_path / "chain", 200, Deltas(parameters=spec, small="pool", keep_segments=1000))
    # Replaying checks the state after every record against the digest in it; to look at each of them here too takes
    # ten times as long with Huffman, which is decoded bit by bit.
    is_slow = isinstance(spec, LC) and spec.entropy == "huffman"
    numbers = [*range(1, 200, 23), 200] if is_slow else list(range(1, 201))
    command = [sys.executable, "-c", READER, str(tmp_path / "chain"), *map(str, numbers)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)
    for number, (found, step, stopped, digests) in zip(numbers, answer, strict=True):
        assert (found, step, stopped) == (number, 10 + number, None)
        assert digests == {name: xxhash.xxh3_128_hexdigest(value.tobytes()) for name, value in known[number].items()}


def test_exact_and_lossy_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "lossy", 2, Deltas())
    states, exact = walk(), Deltas(parameters=Zstd(), first_moments=Raw(), second_moments=Raw())
    with ChainWriter.start(tmp_path / "exact", LEAVES, next(states), step=10, deltas=exact) as chain:
        for step in (11, 12):
            last = next(states)
            chain.append(step, last)
    assert not restore(tmp_path / "lossy").is_exact and restore(tmp_path / "lossy", until=0).is_exact
    found = restore(tmp_path / "exact")
    assert found.is_exact and found.number == 2
    assert all(found.leaves[name].tobytes() == value.tobytes() for name, value in last.items())


def test_what_is_stored_as_it_is_is_exact(tmp_path: Path) -> None:
    states = walk()
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=0, deltas=Deltas(skip_every=4)) as chain:
        for step in range(1, 8):
            last = next(states)
            chain.append(step, last)
    found = restore(tmp_path / "chain").leaves
    for name in ("bias", "half", "scalar", "steps", "nothing"):
        assert found[name].tobytes() == last[name].tobytes(), name
    assert (found["v"] > 0).all() and np.abs(found["v"] / last["v"] - 1).max() <= 1 / 16
    assert np.abs(found["m"] / last["m"] - 1).max() <= 0.5


def test_a_skip_record_is_against_the_base_and_of_the_true_state(tmp_path: Path) -> None:
    """What is restored through it is base plus one difference, and does not depend on the records before it."""
    deltas = Deltas(skip_every=5, keep_segments=9, small="pool")
    write(tmp_path / "all", 11, deltas)
    states = walk()
    with ChainWriter.start(
        tmp_path / "one", LEAVES, next(states), step=10, deltas=Deltas(skip_every=1, small="pool")
    ) as chain:
        truth: list[Arrays] = [next(states) for _ in range(11)]
        chain.append(11, truth[0])
        chain.append(16, truth[5])
        own = chain.state()
        kinds = [chain.append(17, truth[6]).kind]
    through = restore(tmp_path / "all", until=6)
    assert through.replayed == 1 and kinds == ["skip"]
    assert all(through.leaves[name].tobytes() == value.tobytes() for name, value in own.items())
    assert [first for first, _ in list_segments(tmp_path / "all")] == [1, 6, 11]
    (tmp_path / "all" / segment.segment_name(1)).unlink()
    (tmp_path / "all" / segment.segment_name(6)).unlink()
    assert restore(tmp_path / "all").number == 11


def test_old_records_go_only_after_the_skip_record_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, unlink = os.fsync, no_follow.unlink

    def noted_sync(fd: int) -> None:
        happened.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def noted_unlink(path: Path, *, missing_ok: bool = False) -> None:
        happened.append(f"unlink {path.name}")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(no_follow, "unlink", noted_unlink)
    write(tmp_path / "chain", 7, Deltas(skip_every=3, keep_segments=1))
    removals = [i for i, what in enumerate(happened) if what.startswith("unlink")]
    assert [happened[i] for i in removals] == ["unlink 00000001.seg", "unlink 00000004.seg"]
    for i, durable in zip(removals, ("00000004.seg", "00000007.seg"), strict=True):
        assert happened[i - 2 : i] == [f"sync {durable}", "sync chain"], "the file, then its name"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_segments_stay(keep: int, tmp_path: Path) -> None:
    write(tmp_path / "chain", 13, Deltas(skip_every=3, keep_segments=keep))
    assert [first for first, _ in list_segments(tmp_path / "chain")] == [1, 4, 7, 10, 13][-keep:]
    assert restore(tmp_path / "chain").number == 13


def test_a_base_that_is_kept_elsewhere(tmp_path: Path) -> None:
    states = walk()
    base = next(states)
    deltas = Deltas(skip_every=3)
    with ChainWriter.start(tmp_path / "chain", LEAVES, base, step=10, deltas=deltas, base=lambda: base) as chain:
        known = [chain.state()]
        for step in range(11, 19):
            chain.append(step, next(states))
            known.append(chain.state())
    assert not (tmp_path / "chain" / "base.bin").exists()
    assert_is(restore(tmp_path / "chain", base=fill(base)), 8, known)
    with pytest.raises(ConfigError, match="kept elsewhere"):
        restore(tmp_path / "chain")


def test_when_a_new_base_is_due(tmp_path: Path) -> None:
    states = walk()
    base = next(states)

    def start(name: str, **options: object) -> ChainWriter:
        return ChainWriter.start(tmp_path / name, LEAVES, base, step=0, deltas=Deltas(**options))  # type: ignore[arg-type]

    with start("length", most_records=3) as chain:
        assert chain.refresh() is None
        for step in (1, 2, 3):
            assert chain.refresh() is None
            chain.append(step, next(states))
        assert chain.refresh() == "3 records"
    with start("bytes", first_moments=Raw(), second_moments=Raw()) as chain:
        for step in range(1, 4):
            chain.append(step, next(states))
        assert "bytes" in str(chain.refresh())
    with start("kept", least_kept=0.99) as chain:
        chain.append(1, next(states))
        assert "got a symbol" in str(chain.refresh())
    with start("error", parameters=LC(bits=2, scope="global"), most_error=0.01, skip_every=0) as chain:
        for step in range(1, 17):
            assert chain.refresh() is None or "bytes" in str(chain.refresh())
            chain.append(step, next(states))
        assert "error" in str(chain.refresh()) or "bytes" in str(chain.refresh())


def test_other_leaves_ask_for_a_new_base_and_change_nothing(tmp_path: Path) -> None:
    states = walk()
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=0, deltas=Deltas()) as chain:
        chain.append(1, next(states))
        before = chain.state()
        state = next(states)
        for broken in ({**state, "new": np.zeros(3)}, {n: v for n, v in state.items() if n != "bias"},
                       {**state, "bias": np.zeros(61, np.float32)}):  # fmt: skip
            with pytest.raises(StateError, match="new base"):
                chain.append(2, broken)
        assert all(before[name].tobytes() == value.tobytes() for name, value in chain.state().items())
        chain.append(2, state)
        with pytest.raises(ConfigError, match="goes forward"):
            chain.append(2, state)
    assert restore(tmp_path / "chain").number == 2


def test_a_chain_is_never_continued(tmp_path: Path) -> None:
    write(tmp_path / "chain", 2, Deltas())
    with pytest.raises(FileExistsError):
        write(tmp_path / "chain", 2, Deltas())


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_append_ends_the_chain_and_leaves_what_was_durable(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = walk()
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=10, deltas=Deltas()) as chain:
        known = [chain.state()]
        for step in (11, 12):
            chain.append(step, next(states))
            known.append(chain.state())
        with monkeypatch.context() as patch:

            def fail(*_: object) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, call, fail)
            with pytest.raises(PersistError, match="new base"):
                chain.append(13, next(states))
        with pytest.raises(PersistError, match="new base"):
            chain.append(14, next(states))
        assert chain.refresh() is not None
    found = restore(tmp_path / "chain")
    assert found.number in (2, 3)  # a record whose fsync failed may be there, whole, or not
    if found.number == 2:
        assert_is(found, 2, known)


def test_reused_tables_and_dictionaries_are_read(tmp_path: Path) -> None:
    leaves = [CodedLeaf("x", "float32", (3000,), "parameter")]
    rng = np.random.default_rng(0)
    value = rng.standard_normal(3000).astype(np.float32)
    deltas = Deltas(small="pool", skip_every=20, dictionary_bytes=2048)
    with ChainWriter.start(tmp_path / "chain", leaves, {"x": value}, step=0, deltas=deltas) as chain:
        reused = 0
        for step in range(1, 31):
            value = value + rng.standard_normal(3000).astype(np.float32)
            reused += chain.append(step, {"x": value}).reused_tables
            assert restore(tmp_path / "chain").leaves["x"].tobytes() == chain.state()["x"].tobytes()
        assert reused > 5 and chain._coder.memories[0].dictionary


WRITER = """
import sys
from pathlib import Path
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.codecs.assignment import Deltas
from tests.storage.codecs.walks import LEAVES, walk
states = walk()
deltas = Deltas(skip_every=4, keep_segments=1)
with ChainWriter.start(Path(sys.argv[1]), LEAVES, next(states), step=0, deltas=deltas) as chain:
    for number in range(1, 10**6):
        chain.append(number, next(states))
        print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 4, 5, 23])
def test_what_append_returned_from_survives_sigkill(after: int, tmp_path: Path) -> None:
    """Killed at some moment of a later append: every record that was acknowledged is there, and at most one more."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "chain")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as child:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(after)]
        child.kill()
        seen += [int(line) for line in child.stdout.read().split()]
    found = restore(tmp_path / "chain")
    assert found.number in (seen[-1], seen[-1] + 1)
    assert found.stopped is None or found.is_torn
    states = walk()
    truth = [next(states) for _ in range(found.number + 1)][-1]
    assert found.leaves["bias"].tobytes() == truth["bias"].tobytes()


@pytest.mark.parametrize(("piece", "tile"), [(1 << 19, 1 << 26), (512, 1), (512, 4096)])
@pytest.mark.parametrize("together", [1, 3, 16])
@pytest.mark.parametrize("spec", [LC(bits=3), LC(bits=2, entropy="huffman"), Ternary()], ids=lambda spec: spec.text)
def test_records_that_are_applied_together(
    spec: Spec, together: int, piece: int, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many at once, by several threads, in pieces, with skip records in between."""
    monkeypatch.setattr(replay, "_MOST_BATCH", together)
    monkeypatch.setattr(parts, "_SHARED_NBYTES", 1)
    monkeypatch.setattr(parts, "all_threads", lambda: 3)
    monkeypatch.setattr(moving, "PIECE", piece)
    monkeypatch.setattr(moving, "_TILE_NBYTES", tile)
    known = write(tmp_path / "chain", 21, Deltas(parameters=spec, small="pool", skip_every=10, keep_segments=9))
    for until in (1, 2, 9, 10, 11, 12, 20, 21):
        assert_is(restore(tmp_path / "chain", until=until), until, known)


def test_records_that_wait_for_the_others_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes count as what is unpacked of them does: exact state makes records as large as a state."""
    known = write(tmp_path / "chain", 9, Deltas(small="pool", skip_every=16))
    largest = max(os.path.getsize(path) for _, path in list_segments(tmp_path / "chain")) // 9
    sizes, apply = [], replay._Batch.apply

    def count(batch: replay._Batch, image: ChainImage) -> None:
        sizes.append(len(batch._moves))
        apply(batch, image)

    monkeypatch.setattr(replay._Batch, "apply", count)
    for most, expected in ((1, [1] * 9), (3 * largest, None), (1 << 30, [9])):
        sizes.clear()
        monkeypatch.setattr(replay, "_MOST_BATCH_BYTES", most)
        assert_is(restore(tmp_path / "chain"), 9, known)
        assert sizes == expected if expected else 1 < max(sizes) < 5


def test_a_torn_tail_costs_no_second_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while a record is written is usual: those before it are applied, and one digest says they are good."""
    known = write(tmp_path / "chain", 9, Deltas(small="pool", skip_every=16))
    path = list_segments(tmp_path / "chain")[0][1]
    os.truncate(path, path.stat().st_size - 5)
    taken, digest = [], ChainImage.digest
    monkeypatch.setattr(ChainImage, "digest", lambda self: taken.append(1) or digest(self))
    found = restore(tmp_path / "chain")
    assert_is(found, 8, known)
    assert found.is_torn and len(taken) == 2, "of the base and of the end"
