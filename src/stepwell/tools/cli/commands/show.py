"""`stepwell show`: the tree of one checkpoint, with shapes, types, sizes and roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stepwell.errors import DamagedError
from stepwell.restore.whole import Whole, whole_leaf
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.tools.cli import wording
from stepwell.tools.cli.decisions import show_policy
from stepwell.tools.cli.locate import Located, find_run, locate, step_option
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, print_wrapped, say
from stepwell.tools.interchange.merged import tree_of
from stepwell.tools.interchange.outline import METADATA, OutlineNode, outline, summary, value_text

_COLUMNS = (Column("state"), Column("type"), Column("size", right=True), Column("role", gives_way=1))
_FILE_COLUMNS = (Column("your files"), Column("size", right=True))
_INLINE = 60


@click.command()
@click.argument("run")
@step_option
@click.option("--policy", is_flag=True, help="Show how often the run saves, and why.")
@json_option
def show(run: str, step: int | None, policy: bool, as_json: bool) -> None:
    """Show what a checkpoint holds: every tensor with its shape, plain values in short, and your own files.

    Without a step: the checkpoint that a restart would use.
    """
    if policy:
        show_policy(find_run(run), as_json=as_json)
        return
    found = locate(run, step)
    whole = found.whole()
    root = outline(tree_of(whole))
    leaves = {name: whole_leaf(leaf) for name, leaf in whole.leaves.items()}
    attached = [(part.record, file) for part in whole.parts for file in part.record.files if file.kind == "opaque"]
    if as_json:
        print_json(_document(found, whole, root, leaves, attached))
        return
    print_wrapped(_headline(found, whole), indent="  ")
    print_table(_COLUMNS, list(_rows(root, leaves)))
    if attached:
        say()
        print_table(_FILE_COLUMNS, [[_given_name(*pair), wording.size(pair[1].nbytes)] for pair in attached])


def _headline(found: Located, whole: Whole) -> str:
    manifest = found.manifest
    tensors = wording.count(len(whole.leaves), "tensor")
    text = f"{found.label}: {tensors}, {wording.size(whole.nbytes)}, saved {wording.age(manifest.created)} ago"
    if not whole.is_single:
        text += f" by {len(whole.parts)} ranks"
    if manifest.suspect is not None:
        text += f", suspect ({manifest.suspect})"
    if manifest.name is not None:
        text += f", named {manifest.name}"
    return text


def _given_name(record: Record, file: FileEntry) -> str:
    """The name under which the user attached a file, and where it is not rank 0, whose it is."""
    name = file.name.removeprefix(f"{record.owner.stem}.file.")
    return name if record.owner.is_leader else f"{name} (rank {record.owner.rank})"


def _rows(root: OutlineNode, leaves: dict[str, LeafEntry]) -> Iterator[list[str]]:
    shown: dict[str, str] = {}

    def visit(key: str, node: OutlineNode, depth: int, path: str) -> Iterator[list[str]]:
        label = f"{'  ' * depth}{key}"
        if node.leaf is not None:
            yield [label, *_tensor(node, leaves, shown, path)]
        elif not any(True for _ in node.leaves()):
            yield from plain(label, node, depth)
        else:
            yield [label, "", "", ""]
            for name, child in node.children:
                if name != METADATA:
                    yield from visit(name, child, depth + 1, f"{path}/{name}")

    def plain(label: str, node: OutlineNode, depth: int) -> Iterator[list[str]]:
        text = summary(node)
        is_nested = node.is_keyed or any(child.children for _, child in node.children)
        if is_nested and node.children and len(text) > _INLINE // 2:
            yield [label, "", "", ""]
            for name, child in node.children:
                if name != METADATA:
                    yield from plain(f"{'  ' * (depth + 1)}{name}", child, depth + 1)
        else:
            yield [label, text, "", ""]

    for name, child in root.children:
        yield from visit(name, child, 0, name)


def _tensor(node: OutlineNode, leaves: dict[str, LeafEntry], shown: dict[str, str], path: str) -> list[str]:
    leaf = _leaf(node, leaves)
    if leaf.name in shown:
        return [f"same as {shown[leaf.name]}", "", ""]
    shown[leaf.name] = path
    kind = "numpy " if node.kind == "array" else ""
    role = f"{leaf.role}, of each rank" if leaf.private else leaf.role
    return [f"{kind}{leaf.dtype} {list(leaf.shape)}", wording.size(leaf.end - leaf.start), role]


def _leaf(node: OutlineNode, leaves: dict[str, LeafEntry]) -> LeafEntry:
    if node.leaf not in leaves:
        raise DamagedError(f"the record lacks leaf {node.leaf!r}; `stepwell verify` checks the others")
    return leaves[node.leaf]


def _document(
    found: Located,
    whole: Whole,
    root: OutlineNode,
    leaves: dict[str, LeafEntry],
    attached: list[tuple[Record, FileEntry]],
) -> dict[str, Any]:
    record = whole.record
    tensors: list[dict[str, Any]] = []
    values = []
    for path, node in root.walk():
        where = "/".join(path)
        if node.leaf is not None:
            leaf = _leaf(node, leaves)
            tensors.append(
                {
                    "path": where,
                    "leaf": leaf.name,
                    "kind": node.kind,
                    "dtype": leaf.dtype,
                    "shape": list(leaf.shape),
                    "nbytes": leaf.end - leaf.start,
                    "role": leaf.role,
                    "device": leaf.device,
                    **({"of_each_rank": True} if leaf.private else {}),
                }
            )
        elif node.kind == "value" and METADATA not in path:
            values.append({"path": where, "value": value_text(node.value)})
    return {
        "checkpoint": found.label,
        "run": record.run,
        "step": record.id.step,
        "lineage": record.id.lineage,
        "created": wording.stamp(record.created),
        "world_size": found.manifest.world_size,
        "suspect": found.manifest.suspect,
        "nbytes": whole.nbytes,
        "versions": record.versions,
        "tensors": tensors,
        "values": values,
        "files": [
            {"name": _given_name(owner, file), "stored_as": file.name, "nbytes": file.nbytes}
            for owner, file in attached
        ],
    }
