"""Each safety property has a mutation that breaks it; the check that guards the property must see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stepwell.storage.chain import chain_image, replay
from stepwell.storage.chain import chain_writer as chain
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs import histogram, parts, quantise
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import LC, Spec, Top
from stepwell.storage.codecs.histogram import Histogram
from tests.storage.codecs.walks import (
    check_nan_does_no_harm,
    check_small_steps_arrive,
    check_table_is_the_papers,
    write,
)

Floats = NDArray[np.float32]


def test_control_subtracting_the_true_previous_state(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = np.ones(2000, np.float32)

    def look(values: Floats, state: Floats, room: Floats) -> Floats:
        return np.subtract(values, previous, out=room[: values.size])

    def look_and_remember(values: Floats, state: Floats, room: Floats) -> Floats:
        delta = look(values, state, room)
        previous[:] = values
        return delta

    monkeypatch.setattr(histogram, "difference", look)
    monkeypatch.setattr(quantise, "difference", look_and_remember)
    with pytest.raises(AssertionError):
        check_small_steps_arrive()


def test_control_nan_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Histogram, "is_codable", property(lambda self: True))
    monkeypatch.setattr(histogram, "MOST_EXPONENT", 255)
    monkeypatch.setattr(quantise, "is_codable", lambda high, low: True)
    monkeypatch.setattr(quantise, "is_finite", lambda values: True)
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        check_nan_does_no_harm()


def test_control_float_sums_as_representatives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    delta = (rng.standard_normal(3000) * np.exp(rng.standard_normal(3000))).astype(np.float32)
    check_table_is_the_papers(delta, 3)

    def mean(found: Histogram, bits: NDArray[np.uint32], wanted: set[int], room: NDArray[np.uint32]) -> None:
        for key in wanted:
            members = np.abs(bits[bits >> 23 == key].view(np.float32))
            found.lo[key] = found.hi[key] = int(members.mean(dtype=np.float32).view(np.uint32))

    monkeypatch.setattr(histogram, "_extend", mean)
    with pytest.raises(AssertionError):
        check_table_is_the_papers(delta, 3)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A network this small is slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worst_loss_after_restore(directory: Path, second_moments: Spec) -> tuple[float, float, bool]:
    """Train with Adam, restore its second moments from a chain, go on for 10 steps: worst loss, that of the run that
    was not interrupted, and whether no moment became zero.
    """
    torch.manual_seed(0)
    inputs, labels = torch.randn(512, 20), torch.randint(0, 5, (512,))
    inputs[torch.arange(512), labels] += 2
    inputs *= torch.rand(512, 20) < torch.logspace(-2.3, 0, 20)  # rare features: their second moments are very small
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def moments() -> dict[str, NDArray[np.float32]]:
        return {str(i): optimizer.state[p]["exp_avg_sq"].numpy().copy() for i, p in enumerate(model.parameters())}

    step()
    leaves = [CodedLeaf(name, "float32", value.shape, "moment2") for name, value in moments().items()]
    deltas = Deltas(second_moments=second_moments, small_below=1)
    zeros = {name: np.zeros_like(value) for name, value in moments().items()}
    with ChainWriter.start(directory, leaves, zeros, step=0, deltas=deltas) as chain:
        for number in range(1, 3):
            for _ in range(10):
                step()
            chain.append(number, moments())
    weights = [p.detach().clone() for p in model.parameters()]
    first = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    truth = moments()
    control = max(step() for _ in range(10))
    found = restore(directory).leaves
    for i, p in enumerate(model.parameters()):
        p.data.copy_(weights[i])
        optimizer.state[p]["exp_avg"].copy_(first[i])
        optimizer.state[p]["exp_avg_sq"].copy_(torch.from_numpy(found[str(i)].copy()))
    stays = all(((found[name] > 0) == (value > 0)).all() for name, value in truth.items())
    return max(step() for _ in range(10)), control, stays


@pytest.mark.usefixtures("one_thread")
def test_second_moments_stay_and_training_goes_on(tmp_path: Path) -> None:
    for mantissa in (0, 3):
        worst, control, stays = worst_loss_after_restore(tmp_path / str(mantissa), Top(mantissa))
        assert stays and worst < 1.2 * control


@pytest.mark.usefixtures("one_thread")
def test_control_lc_on_second_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deltas, "__post_init__", lambda self: None)
    worst, control, stays = worst_loss_after_restore(tmp_path / "lc", LC(bits=3))
    assert not stays and worst > 1.2 * control


def test_control_without_the_digest_after_a_record_a_wrong_state_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that computes something else than the writer (another rounding, say) is found by the digest alone."""
    known = write(tmp_path / "chain", 3, Deltas(small="pool"))
    apply = parts.apply

    def wrong(part: parts.Part, moves: list[parts.Move], state: NDArray[np.float32], device: object = None) -> None:
        apply(part, moves, state)
        if part.spec == LC():
            state += np.float32(1e-7)

    monkeypatch.setattr(replay, "apply", wrong)
    found = restore(tmp_path / "chain")
    assert found.number == 0 and "digest" in str(found.stopped)
    monkeypatch.setattr(replay, "_check", lambda image, expected, path: None)
    monkeypatch.setattr(chain_image.ChainImage, "digest", lambda self: b"")
    blind = restore(tmp_path / "chain")
    assert blind.number == 3 and blind.leaves["weight"].tobytes() != known[3]["weight"].tobytes()


def test_control_removing_before_the_skip_record_is_durable_loses_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between removal and the record: with the order turned round nothing but the base is left."""

    def early(self: ChainWriter, number: int, head: object, body: bytes, is_skip: bool) -> None:
        if is_skip:
            for _, path in chain.list_segments(self._directory):
                path.unlink()
            raise KeyboardInterrupt  # the crash
        persist(self, number, head, body, is_skip)  # type: ignore[arg-type]

    persist = ChainWriter._persist
    deltas = Deltas(skip_every=3, keep_segments=1)
    monkeypatch.setattr(ChainWriter, "_persist", early)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "early", 4, deltas)
    assert restore(tmp_path / "early").number == 0

    def late(self: ChainWriter, number: int, head: object, body: bytes, is_skip: bool) -> None:
        if is_skip:
            raise KeyboardInterrupt
        persist(self, number, head, body, is_skip)  # type: ignore[arg-type]

    monkeypatch.setattr(ChainWriter, "_persist", late)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "late", 4, deltas)
    assert restore(tmp_path / "late").number == 3
