"""Strides are part of the state: fused optimizers pair memory with memory, whatever the elements are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepwell.restore.load import load
from stepwell.restore.whole import Part
from stepwell.storage.format.checksum import block_digest, document_digest
from stepwell.storage.format.manifest import RecordRef
from stepwell.storage.format.record import FileEntry, Record
from stepwell.training.snapshot.layout import make_plan
from stepwell.training.state.flatten import Flat, flatten
from stepwell.training.state.roles import Role
from stepwell.training.state.share import Cutter, content_of
from stepwell.training.state.strides import fill
from stepwell.training.state.tracked import track
from stepwell.types import CheckpointId, Owner
from tests.restore.build import RunBuilder, _fill, own, restore, restore_only
from tests.training.state.same import difference

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adamw amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
}


def net(seed: int, channels: int = 3) -> torch.nn.Module:
    """A convolution in channels_last, a transposed matrix, and a parameter that is contiguous."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 5))
    made = made.to(memory_format=torch.channels_last)
    made[2].weight = torch.nn.Parameter(made[2].weight.detach().t().contiguous().t())
    return made


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 + number)
    channels = model[0].weight.shape[1]
    model(torch.randn(2, channels, 4, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def strides(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[int, ...]]]:
    """Of each parameter, and of what the optimizer keeps for it."""
    return [
        {"": p.stride(), **{k: v.stride() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}}
        for p in model.parameters()
    ]


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture
def build(tmp_path: Any) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_one_step_later_the_bits_are_the_same(kind: str, channels: int, has_stepped: bool, build: RunBuilder) -> None:
    """channels: with one of them the strides say more than the order of the elements."""
    model = net(1, channels)
    optimizer = FUSED[kind](model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    build.write(state(model, optimizer), 2)
    other = net(2, channels)
    its = FUSED[kind](other.parameters())
    if has_stepped:
        step(other, its, 7)
    restore(build.root, {"model": other, "optimizer": its})
    assert strides(other, its) == strides(model, optimizer)
    for number in (2, 3):
        for some in ((model, optimizer), (other, its)):
            step(*some, number)
        assert difference(state(other, its), state(model, optimizer)) is None


def test_state_alone_comes_back_as_it_lay(build: RunBuilder) -> None:
    """Of objects that are no optimizers too, arrays included; what has gaps or repeats elements comes back dense."""
    image = torch.arange(24.0).view(2, 3, 2, 2)
    values = {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "one channel": image[:, :1].contiguous(memory_format=torch.channels_last),
        "three dimensions": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        "complex": torch.arange(6.0).to(torch.complex128).view(2, 3).t(),
        "float8": torch.arange(6.0).to(torch.float8_e4m3fnuz).view(2, 3).t(),
        "four bits": torch.arange(6, dtype=torch.uint8).view(torch.uint4).view(2, 3),
        "bools": torch.tensor([[True, False, True]] * 2).t(),
        "gaps": torch.arange(24.0).view(4, 6).t()[::2],
        "repeats": torch.arange(3.0).expand(4, 3),
        "nothing": torch.empty(3, 0, 2).transpose(0, 2),
        "number": torch.tensor(1.5),
        "conjugate": torch.arange(6.0).to(torch.complex64).view(2, 3).t().conj(),
        "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "read-only": numpy.broadcast_to(numpy.arange(3.0), (4, 3)),
        "backwards": numpy.arange(6.0).reshape(2, 3)[::-1],
        "dates": numpy.asfortranarray(numpy.arange(6).reshape(2, 3).astype("M8[s]")),
    }
    build.write({"values": values}, 1)
    found: dict[str, Any] = {}
    restore(build.root, {"values": found})
    assert difference(found, values) is None
    made_anew = {"gaps": (1, 3), "repeats": (3, 1), "nothing": (3, 3, 1), "conjugate": (1, 3)}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert value.stride() == made_anew.get(name, values[name].stride()), name
    assert found["fortran"].flags.f_contiguous and found["fortran"].flags.owndata is False
    assert found["backwards"].flags.c_contiguous


@pytest.mark.parametrize("now", ["channels_last", "contiguous"])
def test_a_script_that_lays_its_parameters_out_otherwise(now: str, build: RunBuilder) -> None:
    """Their state follows them, whichever was saved, or a fused step would pair other elements."""
    model = net(1)
    if now == "channels_last":
        model = torch.nn.Sequential(*model).to(memory_format=torch.contiguous_format)
        model[2].weight = torch.nn.Parameter(model[2].weight.detach().contiguous())
    optimizer = FUSED["adam"](model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    build.write(state(model, optimizer), 2)
    other = net(2)
    if now == "contiguous":
        other = other.to(memory_format=torch.contiguous_format)
        other[2].weight = torch.nn.Parameter(other[2].weight.detach().contiguous())
    its = FUSED["adam"](other.parameters())
    restore(build.root, {"model": other, "optimizer": its})
    assert all(len(set(found.values()) - {()}) == 1 for found in strides(other, its))
    for some in ((model, optimizer), (other, its)):
        step(*some, 2)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], atol=1e-6), name


def test_state_that_lies_otherwise_than_its_parameter_stays_so(build: RunBuilder) -> None:
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step(model, optimizer, 0)
    weight = model[0].weight
    optimizer.state[weight]["momentum_buffer"] = optimizer.state[weight]["momentum_buffer"].contiguous()
    assert optimizer.state[weight]["momentum_buffer"].stride() != weight.stride()
    build.write(state(model, optimizer), 1)
    other = net(2)
    its = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, foreach=False)
    restore(build.root, {"model": other, "optimizer": its})
    assert strides(other, its) == strides(model, optimizer)


def without_strides(build: RunBuilder, id: CheckpointId) -> None:
    """As a version wrote it that noted no strides."""
    path = build.paths.checkpoint(id) / "rank-00000.json"
    record = Record.load(path.read_bytes(), path="x")
    assert any(leaf.strides for leaf in record.leaves)
    old = replace(record, leaves=tuple(replace(leaf, strides=None) for leaf in record.leaves)).dump()
    path.write_bytes(old)
    manifest = build.manifest(id)
    named = RecordRef("rank-00000.json", len(old), document_digest(old))
    (build.paths.checkpoint(id) / "manifest.json").write_bytes(replace(manifest, records=(named,)).dump())


@pytest.mark.parametrize("only", [None, {"optimizer"}])
def test_an_older_checkpoint_takes_the_layout_of_its_parameters(only: set[str] | None, build: RunBuilder) -> None:
    model = net(1)
    optimizer = FUSED["adam"](model.parameters())
    step(model, optimizer, 0)
    without_strides(build, build.write(state(model, optimizer), 1))
    other = net(1 if only else 2)
    its = FUSED["adam"](other.parameters())
    if only:
        assert restore_only(build.root, {"model": other, "optimizer": its}, only=only)
        other.load_state_dict(model.state_dict())
    else:
        restore(build.root, {"model": other, "optimizer": its})
    assert strides(other, its) == strides(model, optimizer)
    for some in ((model, optimizer), (other, its)):
        step(*some, 2)
    assert difference(state(other, its), state(model, optimizer)) is None


def test_live_tensors_are_filled_where_they_are(build: RunBuilder) -> None:
    """A large one in several blocks and by several threads, from any byte on."""
    torch.manual_seed(3)
    saved = {"wide": torch.randn(7, 300, 700), "small": torch.randn(3, 5)}
    build.write({"model": saved}, 1)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wide", torch.zeros(700, 7, 300).permute(1, 2, 0))
            self.register_buffer("small", torch.zeros(5, 9)[:, ::3].t())

    other = Holder()
    before = [(value.data_ptr(), value.stride()) for value in other.buffers()]
    restore(build.root, {"model": other})
    assert difference(dict(other.state_dict()), saved) is None
    assert [(value.data_ptr(), value.stride()) for value in other.buffers()] == before


@pytest.mark.parametrize(("start", "count"), [(0, 24), (1, 22), (5, 1), (7, 12), (23, 1), (4, 8), (11, 2)])
def test_any_range_of_elements_finds_its_place(start: int, count: int) -> None:
    tensor = torch.zeros(4, 2, 3, dtype=torch.int64).permute(1, 2, 0)
    fill(tensor, start, torch.arange(1, count + 1))
    expected = torch.zeros(24, dtype=torch.int64)
    expected[start : start + count] = torch.arange(1, count + 1)
    assert torch.equal(tensor.reshape(-1), expected)


# -- many ranks -------------------------------------------------------------------------------------------------------


def part(flat: Flat, rank: int, ranks: int, rows: dict[str, tuple[int, int, str]]) -> Part:
    """What one of the ranks stores, as its agent would."""
    mine = Cutter(rows).cut(flat)
    plan = make_plan(1, mine.leaves, [Role("loose", "value", lambda: None)] * len(mine.leaves))
    arena = _fill(mine, plan)
    data = bytes(arena.image(0, plan.live.nbytes))
    arena.close()
    blocks = tuple(block_digest(data[at : at + 4096]) for at in range(0, len(data), 4096))
    file = FileEntry(f"rank-{rank:05d}.safetensors", "safetensors", len(data), 4096, blocks)
    run, id = "0" * 16, CheckpointId(1, 0, 1)
    text = Record(run, id, Owner(rank, ranks), 1.0, (file,), plan.entries, flat.tree).dump()

    class Bytes:
        label, threads = "bytes", 1

        def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
            buffer[:nbytes] = data[start : start + nbytes]
            return buffer[:nbytes]

        def close(self) -> None: ...

    return Part(Record.load(text, path="x"), lambda file: Bytes())


@pytest.mark.parametrize("has_stepped", [False, True])
def test_copies_that_two_ranks_stored_in_rows(has_stepped: bool) -> None:
    model = net(1)
    optimizer = FUSED["adam"](model.parameters())
    step(model, optimizer, 0)
    flat = flatten({**state(model, optimizer), "stepwell": own(1)})
    counts = {leaf.name: leaf.tensor.shape[0] for leaf in flat.leaves if leaf.tensor.dim()}
    cuts = [{n: (0, c // 2, "0,1") for n, c in counts.items()}, {n: (c // 2, c, "0,1") for n, c in counts.items()}]
    parts = [part(flat, rank, 2, rows) for rank, rows in enumerate(cuts)]
    for mine in (0, 1, None):
        other = net(2)
        its = FUSED["adam"](other.parameters())
        if has_stepped:
            step(other, its, 7)
        load(parts, track({"model": other, "optimizer": its}), mine=mine, only=None, strict=True)
        assert strides(other, its) == strides(model, optimizer)
        assert difference(state(other, its), state(model, optimizer)) is None


def test_copies_that_lie_otherwise_on_another_rank_are_no_copies() -> None:
    one, other = (
        flatten({"values": {"w": torch.zeros(2, 3, 2, 2).contiguous(memory_format=layout)}}).leaves[0]
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    said = [content_of(leaf, "the same bytes") for leaf in (one, one, other)]
    assert said[0] == said[1] != said[2]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process as the first of two ranks that never talk."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Sharded(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh, seed: int, *, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        local = torch.randn(6, 4).t() if is_transposed else torch.randn(4, 6)
        self.weight = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_shards_of_distributed_tensors(now: bool, has_stepped: bool, mesh: DeviceMesh) -> None:
    """now: whether the shard is transposed in the script that restores, as it was when it was saved."""

    def stepped(model: Sharded, optimizer: torch.optim.Optimizer) -> None:
        model.weight.grad = DTensor.from_local(torch.ones_like(model.weight.to_local()), mesh, [Shard(0)])
        optimizer.step()

    def local_strides(model: Sharded, optimizer: torch.optim.Optimizer) -> set[tuple[int, ...]]:
        moments = [optimizer.state[model.weight][name] for name in ("exp_avg", "exp_avg_sq")]
        return {value.to_local().stride() for value in (model.weight, *moments)}

    model = Sharded(mesh, 1, is_transposed=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    flat = flatten({**state(model, optimizer), "stepwell": own(1)})
    rows = {leaf.name: (0, 4, "") for leaf in flat.leaves if leaf.origin is not None}
    mine = part(flat, 0, 2, rows)
    assert {leaf.strides for leaf in mine.record.leaves if leaf.name in rows} == {(1, 8)}
    other = Sharded(mesh, 2, is_transposed=now)
    its = torch.optim.Adam(other.parameters(), lr=0.1)
    if has_stepped:
        stepped(other, its)
    load([mine], track({"model": other, "optimizer": its}), mine=0, only=None, strict=True)
    assert local_strides(other, its) == {(1, 4) if now else (6, 1)}
    for name in ("exp_avg", "exp_avg_sq"):
        saved, found = (some.state[m.weight][name].to_local() for m, some in ((model, optimizer), (other, its)))
        assert torch.equal(saved, found)
