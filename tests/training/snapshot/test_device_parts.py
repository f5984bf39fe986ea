"""The parts of the device copy that need no device: which bytes go where. The rest is in tests/gpu."""

from __future__ import annotations

import itertools

import pytest
import torch

from stepwell.training.cuda.copy_graph import CopyBatch
from stepwell.training.snapshot import device_copy
from stepwell.training.snapshot.device_copy import DeviceProgram, Strategy
from stepwell.training.snapshot.inflight import Fill
from stepwell.training.snapshot.program import CopySource

KINDS = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex128, torch.int64]


def make(seed: int) -> tuple[list[CopySource], torch.Tensor]:
    """Leaves of many types, sizes and strides, one after the other after a header of 64 bytes; and their image."""
    torch.manual_seed(seed)
    sources, image, start = [], [torch.zeros(64, dtype=torch.uint8)], 64
    for number, kind in enumerate(sorted(KINDS * 7, key=lambda kind: -kind.itemsize)):
        shape = [(), (1,), (3, 5), (40, 40), (7, 300), (1,), (64, 64)][number % 7]
        tensor = (torch.rand(shape, dtype=torch.float64) * 200).to(kind)
        if number % 7 == 3:
            tensor = tensor.t()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        sources.append(CopySource(str(number), tensor, start, raw.numel(), number % 3 != 0, False))
        image.append(raw)
        start += raw.numel()
    return sources, torch.cat(image)


@pytest.mark.parametrize("strategy", ["overlap", "device"])
@pytest.mark.parametrize("seed", range(5))
def test_every_byte_lands_in_its_place(seed: int, strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 10_000)
    sources, expected = make(seed)
    image = torch.zeros_like(expected)
    program = DeviceProgram(sources)
    marked = []
    for start, batch in program.batches(image, (0, 0), strategy):
        batch.launch(None)  # type: ignore[arg-type]
        marked.append(start)
    for run in program.runs(strategy):
        buffer = run.stage().view(torch.uint8)
        for start in device_copy._cuts(run):
            low = start - run.start
            piece = buffer[low : low + device_copy._CHUNK_BYTES]
            image[start : start + piece.numel()] = piece
            marked.append(start)
    assert torch.equal(image, expected)
    assert sorted(marked) == sorted(program.starts(strategy))
    assert (strategy == "device") == (not program.batches(image, (0, 0), strategy))


@pytest.mark.parametrize("strategy", ["overlap", "device"])
def test_what_may_change_is_private_once_it_is_staged(strategy: Strategy) -> None:
    """Loose leaves are overwritten after the trigger, before anything is copied to the host."""
    sources, expected = make(1)
    image, program = torch.zeros_like(expected), DeviceProgram(sources)
    staged = [(run, run.stage().view(torch.uint8)) for run in program.runs(strategy)]
    for source in sources:
        if strategy == "device" or not source.is_late:
            source.tensor.zero_()
    for _, batch in program.batches(image, (0, 0), strategy):
        batch.launch(None)  # type: ignore[arg-type]
    for run, buffer in staged:
        image[run.start : run.start + run.nbytes] = buffer
    assert torch.equal(image, expected)


def test_control_late_leaves_are_copied_from_where_they_lie() -> None:
    sources, expected = make(1)
    image, program = torch.zeros_like(expected), DeviceProgram(sources)
    staged = [(run, run.stage().view(torch.uint8)) for run in program.runs("overlap")]
    for source in sources:
        source.tensor.zero_()
    for _, batch in program.batches(image, (0, 0), "overlap"):
        batch.launch(None)  # type: ignore[arg-type]
    for run, buffer in staged:
        image[run.start : run.start + run.nbytes] = buffer
    assert not torch.equal(image, expected)


def test_copies_one_by_one_where_there_is_no_runtime_library() -> None:
    target, source = torch.zeros(10, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)
    batch = CopyBatch([(target[:5], source[:5]), (target[5:], source[5:])], prepare=True)
    batch.launch(None)  # type: ignore[arg-type]
    batch.close()
    assert torch.equal(target, source)


def test_fill_never_says_more_than_is_there() -> None:
    """Whatever the order: what is final ends at the first piece that is not copied."""
    starts, size = [64, 100, 4000, 9000], 12000
    for order in itertools.permutations(starts):
        said: list[int] = []
        fill, copied = Fill(size, starts, said.append), set()
        for start in order:
            fill.mark(start)
            copied.add(start)
            expected = min((s for s in starts if s not in copied), default=size)
            assert said[-1:] in ([], [expected]) and all(value <= expected for value in said)
        assert said[-1] == size
        assert said == sorted(said)
