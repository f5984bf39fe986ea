"""What a rank stores of the state it holds: views of its rows, all of what is its own."""

from __future__ import annotations

import pytest
import torch

from stepwell.storage.format.box import Box
from stepwell.training.snapshot.guard import Copies, digests
from stepwell.training.state.fingerprint import content_digest
from stepwell.training.state.flatten import Flat, Leaf, flatten
from stepwell.training.state.share import Cutter, content_of, describe, held_box


def flat_of(**tensors: torch.Tensor) -> Flat:
    return flatten({"model": dict(tensors)})


def by_name(flat: Flat) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in flat.leaves}


def test_rows_are_views_of_the_live_tensor() -> None:
    w, b = torch.arange(12.0).view(6, 2), torch.arange(3.0)
    cut = Cutter({"model/w": (2, 5, "0,1"), "model/b": (0, 0, "0,1")}).cut(flat_of(w=w, b=b))
    (leaf,) = cut.leaves
    assert leaf.name == "model/w" and leaf.tensor.data_ptr() == w[2].data_ptr()
    assert torch.equal(leaf.tensor, w[2:5]) and leaf.local is not leaf.tensor and leaf.local.shape == (6, 2)
    assert (leaf.global_shape, leaf.box) == ((6, 2), Box((2, 0), (3, 2))) and not leaf.is_private
    w.add_(1)
    assert torch.equal(leaf.tensor, w[2:5]), "nothing was copied"


def test_all_rows_are_the_tensor_itself() -> None:
    w, s = torch.ones(4, 2), torch.tensor(3)
    cut = Cutter({"model/w": (0, 4, "0,1"), "model/s": (0, 1, "0,1")}).cut(flat_of(w=w, s=s))
    assert [leaf.tensor.shape for leaf in cut.leaves] == [(4, 2), ()]
    assert cut.leaves[1].box == Box((), ())


def test_what_is_not_named_is_the_ranks_own_and_whole() -> None:
    (leaf,) = Cutter({}).cut(flat_of(w=torch.ones(4))).leaves
    assert leaf.is_private and leaf.tensor.shape == (4,) and leaf.global_shape is None


def test_a_part_that_is_not_named_is_the_ranks_own_part() -> None:
    """Or the parts of another tensor of the same name would be taken for parts of this one."""
    part = Leaf("w", ("model", "w"), torch.ones(2, 3), global_shape=(4, 3), box=Box((2, 0), (2, 3)))
    (leaf,) = Cutter({}).cut(Flat({}, [part])).leaves
    assert leaf.is_private and leaf.box == Box((2, 0), (2, 3))


def test_rows_of_a_part_count_from_its_start() -> None:
    part = Leaf("w", ("model", "w"), torch.arange(6.0).view(2, 3), global_shape=(4, 3), box=Box((2, 0), (2, 3)))
    (leaf,) = Cutter({"w": (1, 2, "1,3")}).cut(Flat({}, [part])).leaves
    assert leaf.box == Box((3, 0), (1, 3)) and leaf.tensor.tolist() == [[3.0, 4.0, 5.0]]


def test_leaves_that_stay_are_cut_once() -> None:
    flat = flat_of(w=torch.ones(4), s=torch.ones(2))
    fixed = Flat(flat.tree, flat.leaves, fixed=object(), fixed_count=1)
    cutter = Cutter({"model/w": (0, 2, "0,1"), "model/s": (1, 2, "0,1")})
    one, two = cutter.cut(fixed), cutter.cut(Flat(flat.tree, flat.leaves, fixed.fixed, 1))
    assert one.fixed is two.fixed and one.leaves[0] is two.leaves[0] and one.leaves[1] is not two.leaves[1]
    other = cutter.cut(Flat(flat.tree, flat.leaves, object(), 1))
    assert other.fixed is not one.fixed and other.leaves[0] is not one.leaves[0]
    assert [copy[:2] for copy in one.fixed_copies + one.copies] == [("0,1", "model/w"), ("0,1", "model/s")]


def test_copies_are_what_others_hold_too_though_this_rank_stores_nothing_of_it() -> None:
    flat = flat_of(w=torch.ones(4), own=torch.ones(2), empty=torch.ones(0))
    cut = Cutter({"model/w": (0, 0, "0,1"), "model/empty": (0, 0, "0,1")}).cut(flat)
    assert [name for _, name, _ in cut.copies] == ["model/w"]
    assert [leaf.name for leaf in cut.leaves] == ["model/own"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_digest_of_copies_does_not_depend_on_what_stays(count: int) -> None:
    """One rank may remember objects that another one has to ask each time: that is no difference."""
    tensors = {"w": torch.arange(200.0), "n": torch.arange(3), "b": torch.arange(7.0)}
    leaves = flat_of(**tensors).leaves
    rows = {leaf.name: (0, 1, "0,1") for leaf in leaves}
    plain = Cutter(rows).cut(Flat({}, leaves))
    fixed = Cutter(rows).cut(Flat({}, leaves[::-1], object(), count))
    expected = digests(Copies().take(plain))
    assert digests(Copies().take(fixed)) == expected and list(expected) == ["0,1"]
    tensors["b"][3] += 1
    assert digests(Copies().take(fixed)) != expected


def test_describe() -> None:
    (leaf,) = flat_of(w=torch.ones(2, 3)).leaves
    assert describe(leaf) == ("float32", (2, 3), Box.whole((2, 3)), "")
    assert held_box(leaf) == ((2, 3), Box.whole((2, 3)))
    (empty,) = flat_of(w=torch.ones(0)).leaves
    assert content_of(empty, content_digest(empty.local)) != bytes(8), "nothing has a digest too"
