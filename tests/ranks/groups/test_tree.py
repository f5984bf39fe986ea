"""Who is connected to whom: two levels, and few connections at each rank."""

from __future__ import annotations

import pytest

from stepwell.ranks.line.line_tree import Tree

SHAPES = {
    "alone": [0],
    "one node": [0] * 8,
    "one rank on each": list(range(8)),
    "even": [rank // 8 for rank in range(64)],
    "dealt out": [rank % 3 for rank in range(10)],
    "uneven": [0, 1, 1, 1, 2, 0, 3, 3],
}


def trees(node_of: list[int]) -> list[Tree]:
    return [Tree(rank, node_of) for rank in range(len(node_of))]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_has_a_way_to_rank_0_and_back(shape: str) -> None:
    all_trees = trees(SHAPES[shape])
    top = all_trees[0]
    assert top.parent is None
    for tree in all_trees[1:]:
        assert tree.parent is not None and tree.rank in all_trees[tree.parent].children
        way = top.way_to(tree.rank)
        assert way is not None and way in top.children and tree.rank in top.behind(way)
        assert way == tree.rank or tree.rank in all_trees[way].children
    assert sorted(rank for child in top.children for rank in top.behind(child)) == list(range(1, len(all_trees)))


@pytest.mark.parametrize("shape", ["one node", "one rank on each"])
def test_it_may_be_a_star(shape: str) -> None:
    top, *others = trees(SHAPES[shape])
    assert top.children == set(range(1, 8))
    assert all(tree.parent == 0 and not tree.children for tree in others)


def test_connections_are_those_of_a_node_and_one_for_each_node() -> None:
    """1,024 ranks on 128 nodes; a rank is with others of its own node only, but for the first ones."""
    node_of = [rank // 8 for rank in range(1024)]
    all_trees = trees(node_of)
    counts = [len(tree.children) + (tree.parent is not None) for tree in all_trees]
    assert counts[0] == 127 + 7
    assert {counts[rank] for rank in range(8, 1024, 8)} == {8}
    assert {counts[rank] for rank in range(1024) if rank % 8} == {1}
    assert all(node_of[child] == node_of[tree.rank] for tree in all_trees[1:] for child in tree.children)
