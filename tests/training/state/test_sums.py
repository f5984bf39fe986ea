"""Digests that a device can take: as good as the arithmetic on plain numbers, and alive to every bit."""

from __future__ import annotations

import pytest
import torch

from stepwell.training.state import device_sums as module
from stepwell.training.state.device_sums import sums

MASK = (1 << 64) - 1
STEP, FIRST, SECOND = (number & MASK for number in (module._STEP, module._FIRST, module._SECOND))


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def expected(words: list[int]) -> int:
    """The same sum in Python's numbers."""
    total = 0
    for place, word in enumerate(words):
        mixed = ((word + place * STEP) * FIRST) & MASK
        mixed ^= (signed(mixed) >> 29) & MASK
        mixed = (mixed * SECOND) & MASK
        mixed ^= (signed(mixed) >> 32) & MASK
        total += mixed
    return signed(total & MASK)


def found(*tensors: torch.Tensor) -> list[int]:
    values: dict[int, int] = {}
    for indices, batch in sums(tensors):
        values |= dict(zip(indices, batch.tolist(), strict=True))
    return [values[index] for index in range(len(tensors))]


@pytest.mark.parametrize("chunk", [3, 7, 1 << 22])
def test_the_sum_is_that_of_plain_numbers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    torch.manual_seed(0)
    tensors = [torch.randint(-(1 << 62), 1 << 62, (count,)) for count in (1, 5, 5, 20)]
    assert found(*tensors) == [expected(tensor.tolist()) for tensor in tensors]
    short = [torch.randint(-(1 << 14), 1 << 14, (9,), dtype=torch.int16) for _ in range(3)]
    assert found(*short) == [expected(tensor.tolist()) for tensor in short]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
def test_every_kind_of_element_has_one(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4, 6)).to(torch.float32).to(dtype)
    other = tensor.clone()
    assert found(tensor) == found(other) == found(tensor.t().contiguous().t())
    other.view(torch.uint8).view(-1)[-1] ^= 1
    assert found(tensor) != found(other)


def test_a_bit_anywhere_changes_it() -> None:
    base = torch.zeros(50)
    seen = {found(base)[0]}
    for place in range(50):
        for bit in range(32):
            other = base.clone()
            other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            seen.add(found(other)[0])
    assert len(seen) == 1 + 50 * 32


def test_signs_that_change_in_two_places_do_not_cancel() -> None:
    """In a sum of products the highest bits of two words would."""
    base = torch.ones(8, dtype=torch.float64)
    other = base.clone()
    other[[2, 5]] *= -1
    assert found(base) != found(other) != found(base.flip(0) * 2)


def test_without_memory_it_takes_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, asked = module._sum_rows, []

    def short(rows: list[torch.Tensor], chunk: int) -> torch.Tensor:
        asked.append(chunk)
        if chunk == module._CHUNK:
            raise torch.OutOfMemoryError("no memory")
        return inner(rows, chunk)

    tensor = torch.arange(100)
    whole = found(tensor)
    monkeypatch.setattr(module, "_sum_rows", short)
    assert found(tensor) == whole and asked == [module._CHUNK, module._SMALL_CHUNK]


def test_nothing_has_a_sum_too() -> None:
    assert found(torch.empty(0), torch.empty(0)) == [0, 0]
