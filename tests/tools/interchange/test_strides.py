"""Other tools get tensors as they lay, and a difference in that is told."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from stepwell.tools.interchange.comparison import Change, compare
from stepwell.tools.interchange.reading import open_checkpoint
from stepwell.tools.interchange.torch_file import write_torch
from tests.restore.build import RunBuilder
from tests.training.state.same import difference


def test_a_torch_file_and_a_comparison(tmp_path: Path) -> None:
    image = torch.arange(24.0).view(2, 3, 2, 2)
    values = {"image": image.contiguous(memory_format=torch.channels_last), "plain": image,
              "array": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))}  # fmt: skip
    one, other = RunBuilder(tmp_path / "one"), RunBuilder(tmp_path / "other")
    one.write({"values": values}, 1)
    other.write({"values": {**values, "image": image.clone()}}, 1)
    write_torch(open_checkpoint(one.root, None), tmp_path / "file.pt", only="values", force=False)
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["image"].stride() == values["image"].stride() and found["array"].stride() == (1, 2)
    assert difference(found["image"], values["image"]) is None and found["array"].tolist() == values["array"].tolist()
    told = compare(open_checkpoint(one.root, None), open_checkpoint(other.root, None))
    assert [change for change in told.changes if change.path.startswith("values/")] == [
        Change("strides", "values/image", "[12, 1, 6, 3]", "row by row")
    ]
