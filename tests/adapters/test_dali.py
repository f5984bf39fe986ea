"""DALI iterators, on the CPU: the next batch and its random operations are those of the run that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.adapters.dali import Resumable
from stepwell.errors import DataError
from stepwell.events.journal import read_events

dali = pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (nvidia-dali-cuda120, 955 MB)")
COUNT = 22


def resumable(folder: Path, *, shards: int = 1, auto_reset: bool = False, count: int = COUNT) -> Resumable:
    """Labels in DALI's own shuffled order, each with random numbers."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.txt" for number in range(count)]
    for number, file in enumerate(files):
        file.write_text(f"sample {number}")

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, enable_checkpointing=True, seed=5)
    def pipe() -> Any:
        options = {
            "shuffle_after_epoch": True,
            "pad_last_batch": True,
            "name": "reader",
            "num_shards": shards,
            "shard_id": 0,
        }
        _, label = fn.readers.file(files=[str(file) for file in files], labels=list(range(count)), **options)
        return label, fn.random.uniform(range=[0.0, 1.0], shape=[2])

    def make(checkpoints: list[bytes] | None) -> Any:
        built = pipe(checkpoint=checkpoints[0] if checkpoints else None)
        policy = LastBatchPolicy.PARTIAL
        options = {"reader_name": "reader", "last_batch_policy": policy, "auto_reset": auto_reset}
        return DALIGenericIterator([built], ["label", "noise"], **options)

    return Resumable(make)


Seen = list[tuple[int, int, tuple[float, ...]]]


def train(where: Path, data: Any, steps: int) -> Seen:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"policy": stepwell.Never(), "data": data, "model": model, "optimizer": optimizer}
    ckpt = stepwell.Checkpointer(where, **options)
    ckpt.restore()
    seen: Seen = []
    for epoch in ckpt.epochs(3):
        for ((batch),) in ckpt.data:
            noise = batch["noise"]
            labels = batch["label"].flatten().tolist()
            seen += [(epoch, label, tuple(row.tolist())) for label, row in zip(labels, noise, strict=True)]
            model(noise).mean().backward()
            optimizer.step()
            steps -= 1
            if not steps:
                ckpt.close()
                return seen
    return seen


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("stops", [(1, 2, 4), (5, 1, 1), (6, 6)])
def test_it_goes_on_with_the_same_bytes(auto_reset: bool, stops: tuple[int, ...], tmp_path: Path) -> None:
    def data() -> Resumable:
        return resumable(tmp_path / "files", auto_reset=auto_reset)

    straight = train(tmp_path / "straight", data(), 10**6)
    assert len({(epoch, label) for epoch, label, _ in straight}) == len(straight) == 3 * COUNT
    seen: Seen = []
    for steps in (*stops, 10**6):
        seen += train(tmp_path / "often", data(), steps)
    assert seen == straight
    found = read_events(tmp_path / "often" / "events.jsonl")
    assert {event["data"] for event in found if event["kind"] == "start"} == {"exact"}


@pytest.mark.parametrize("change", [{"shards": 2}, {"count": 23}], ids=str)
def test_another_shard_or_data_set_is_refused(change: dict[str, int], tmp_path: Path) -> None:
    train(tmp_path / "run", resumable(tmp_path / "files"), 2)
    with pytest.raises(DataError, match="Resumable"):
        train(tmp_path / "run", resumable(tmp_path / "files", **change), 2)
