"""On CUDA: verified blocks reach device tensors through page-locked staging, bit for bit, from arena and disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import DamagedError
from stepwell.events.journal import read_events
from stepwell.restore.byte_sources import BlockSource, FileSource, MemorySource
from stepwell.restore.into_tensors import Placing
from stepwell.restore.verified_read import read_file
from stepwell.storage.format.record import LeafEntry
from tests.restore.test_read import BLOCK, in_memory, leaves, stored

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
POISON = 0xA5


def devices() -> list[str]:
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


def poisoned(every: list[LeafEntry], random_: random.Random) -> dict[str, torch.Tensor]:
    """A leaf in five has no tensor; the others are spread over all devices."""
    return {
        leaf.name: torch.full(
            (leaf.end - leaf.start,), POISON, dtype=torch.uint8, device=random_.choice(["cpu", *devices()[1:] * 3])
        )
        for leaf in every
        if random_.random() < 0.8
    }


def threaded(kind: str, threads: int, memory: MemorySource, path: Path) -> BlockSource:
    if kind == "file":
        source: BlockSource = type("Threaded", (FileSource,), {"threads": threads})(path)
        return source
    memory.__class__ = type("Threaded", (MemorySource,), {"threads": threads})
    return memory


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_random_layouts_arrive_bit_for_bit(tmp_path: Path, kind: str, threads: int) -> None:
    dice = random.Random(threads)
    for _ in range(6):
        nbytes = dice.randint(1, 60 * BLOCK)
        content = dice.randbytes(nbytes)
        every = leaves([dice.randint(0, nbytes) for _ in range(dice.randint(0, 90))], nbytes)
        tensors = poisoned(every, dice)
        path = tmp_path / "x"
        path.write_bytes(content)
        with in_memory(content, before=4096) as memory, Placing(tensors) as placing:
            for _ in range(2):  # staging of the first file serves the second
                source = threaded(kind, threads, memory, path)
                assert read_file(source, stored(content), every, placing, check_all=True) == nbytes
                source.close()
        for leaf in every:
            if leaf.name in tensors:
                assert bytes(tensors[leaf.name].cpu().numpy()) == content[leaf.start : leaf.end], leaf.name


def test_nothing_of_a_damaged_block_reaches_the_device(tmp_path: Path) -> None:
    nbytes = 12 * BLOCK
    content = bytes(i * 7 % 151 for i in range(nbytes))
    (leaf,) = leaves([], nbytes)
    for number in range(12):
        damaged = bytearray(content)
        damaged[number * BLOCK + 99] ^= 1
        target = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cuda")
        with (
            in_memory(bytes(damaged)) as memory,
            Placing({leaf.name: target}) as placing,
            pytest.raises(DamagedError, match=f"bytes {number * BLOCK} to"),
        ):
            read_file(threaded("memory", 4, memory, tmp_path), stored(content), [leaf], placing, check_all=True)
        found = target.cpu()
        assert (found[number * BLOCK : (number + 1) * BLOCK] == POISON).all()
        for other in range(12):
            block = bytes(found[other * BLOCK : (other + 1) * BLOCK].numpy())
            assert set(block) == {POISON} or block == content[other * BLOCK : (other + 1) * BLOCK]


def test_work_queued_before_the_restore_does_not_overwrite_it() -> None:
    """The lanes have streams of their own: they wait for what the current stream still has to do."""
    content = bytes(64 * BLOCK)
    (leaf,) = leaves([], len(content))
    target = torch.empty(len(content), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    target.fill_(POISON)
    with in_memory(content) as memory, Placing({leaf.name: target}) as placing:
        read_file(memory, stored(content), [leaf], placing, check_all=True)
    assert not target.any()  # at once, on the current stream


def test_the_callers_stream_and_device_stay_as_they_were() -> None:
    """A single block is read in the caller's own thread."""
    (leaf,) = leaves([], BLOCK)
    target = torch.full((BLOCK,), POISON, dtype=torch.uint8, device=devices()[-1])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with in_memory(bytes(BLOCK)) as memory, Placing({leaf.name: target}) as placing:
            read_file(memory, stored(bytes(BLOCK)), [leaf], placing, check_all=True)
        assert torch.cuda.current_stream() == side and torch.cuda.current_device() == 0
    assert not target.any()


class Mixed(torch.nn.Module):
    """What a model may hold, some of it larger than a block of 4 MiB."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = torch.Generator().manual_seed(seed)
        self.large = torch.nn.Parameter(self._random(1700, 1900))
        self.turned = torch.nn.Parameter(self._random(1500, 1100).t())  # not contiguous
        self.halved = torch.nn.Parameter(self._random(1024, 513).to(torch.bfloat16))
        self.scalar = torch.nn.Parameter(self._random())
        self.many = torch.nn.ParameterList(self._random(number % 7 + 1) for number in range(300))
        self.register_buffer("count", torch.tensor(seed, device="cuda"))
        self.register_buffer("empty", torch.empty(0, 3, device="cuda"))
        self.register_buffer("mask", self._random(99) > 0)
        self.register_buffer("spectrum", self._random(50).to(torch.complex64))
        self.register_buffer("on_host", self._random(2000, 700).cpu())
        self.register_buffer("host_scalar", torch.tensor(seed * 0.5))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._dice).cuda()


def build(seed: int, *, steps: int) -> dict[str, Any]:
    model = Mixed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * seed)
        optimizer.step()
    values = {"zero": torch.tensor(seed, device="cuda"), "host": torch.arange(seed), "text": "a" * seed}
    return {"model": model, "optimizer": optimizer, "values": values}


def save_and_die(where: str) -> None:
    """In another process: one that is killed, so that its agent lingers with the arena."""
    objects = build(3, steps=2)
    ckpt = stepwell.Checkpointer(where, policy=stepwell.Never(), **objects)
    ckpt.restore()
    ckpt.save().wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STEPWELL_LINGER", "60")
    code = "import sys; from tests.gpu.test_restore_pipeline import save_and_die; save_and_die(sys.argv[1])"
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    yield tmp_path / "run"


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    states = [[item[name].state_dict() for name in ("model", "optimizer")] for item in (found, expected)]
    for (key, ours), theirs in zip(states[0][0].items(), states[1][0].values(), strict=True):
        assert ours.device == theirs.device and ours.dtype == theirs.dtype and bits(ours) == bits(theirs), key
    ours, theirs = states[0][1]["state"], states[1][1]["state"]
    assert ours.keys() == theirs.keys()
    for number in ours:
        for key in theirs[number]:
            a, b = ours[number][key], theirs[number][key]
            assert a.device == b.device and a.dtype == b.dtype and bits(a) == bits(b), f"{number} {key}"
    for key in ("zero", "host"):
        assert bits(found["values"][key]) == bits(expected["values"][key])
        assert found["values"][key].device == expected["values"][key].device
    assert found["values"]["text"] == expected["values"]["text"]


def restored(where: Path, objects: dict[str, Any]) -> str:
    """Restore into these objects; where it came from."""
    ckpt = stepwell.Checkpointer(where, policy=stepwell.Never(), **objects)
    addresses = [parameter.data_ptr() for parameter in objects["model"].parameters()]
    assert ckpt.restore()
    assert [parameter.data_ptr() for parameter in objects["model"].parameters()] == addresses
    source = [event for event in read_events(where / "events.jsonl") if event["kind"] == "restore"][-1]["source"]
    ckpt.close(save=False)
    return str(source)


@pytest.mark.timeout(300)
def test_a_mixed_state_from_arena_and_disk(saved: Path) -> None:
    expected = build(3, steps=2)
    fresh = build(8, steps=0)  # optimizer state is made by the restore
    assert restored(saved, fresh) == "memory"
    assert_equal(fresh, expected)
    for steps in (0, 1):  # and with optimizer state that is filled in place
        again = build(9, steps=steps)
        assert restored(saved, again) == "disk"
        assert_equal(again, expected)


@pytest.mark.timeout(300)
def test_a_restore_on_a_side_stream(saved: Path) -> None:
    """The current stream of the caller is what its tensors belong to."""
    expected, found = build(3, steps=2), build(8, steps=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            found["model"].large.fill_(7)
        restored(saved, found)
        assert_equal(found, expected)
