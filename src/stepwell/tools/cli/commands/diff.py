"""`stepwell diff`: two checkpoints side by side."""

from __future__ import annotations

from typing import Any

import click

from stepwell.events.progress_bar import bar
from stepwell.tools.cli import wording
from stepwell.tools.cli.locate import Located, locate
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, print_wrapped, say
from stepwell.tools.interchange.comparison import Change, Comparison, compare

_COLUMNS = (Column("what"), Column("where"), Column("how"))


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two checkpoints, tensor by tensor and value by value.

    A and B are RUN (the checkpoint a restart would use), RUN@STEP, or a checkpoint's own directory. Exit code 1 if they
    differ.
    """
    left, right = locate(a), locate(b)
    wholes = left.whole(), right.whole()
    with bar("comparing", wholes[0].tensor_bytes) as progress:
        found = compare(*wholes, progress.add)
    if as_json:
        print_json(_document(left, right, found))
    else:
        _print(left, right, found)
    if found.changes:
        raise SystemExit(1)


def _print(left: Located, right: Located, found: Comparison) -> None:
    same = f"{wording.count(found.equal_tensors, 'tensor')} and {wording.count(found.equal_values, 'value')} equal"
    ranks = left.manifest.world_size, right.manifest.world_size
    if ranks[0] != ranks[1]:
        print_wrapped(
            f"{ranks[0]} ranks wrote a, {ranks[1]} wrote b; of the state of single ranks, only rank 0's is compared"
        )
    if not found.changes:
        say(f"no difference: {same}")
        return
    say(f"a: {left.label}")
    say(f"b: {right.label}")
    print_table(_COLUMNS, [[change.kind, change.path, _how(change)] for change in found.changes])
    say(f"{wording.count(len(found.changes), 'difference')}; {same}")


def _how(change: Change) -> str:
    gap = change.distance
    if gap is None:
        return " -> ".join(text for text in (change.a, change.b) if text is not None)
    text = f"{gap.different} of {change.elements}"
    if gap.largest is not None:
        text += f", by {gap.largest:.3g} at most"
    if gap.non_finite:
        text += f", {gap.non_finite} not finite"
    return text


def _document(left: Located, right: Located, found: Comparison) -> dict[str, Any]:
    return {
        "a": left.label,
        "b": right.label,
        "equal": not found.changes,
        "equal_tensors": found.equal_tensors,
        "equal_values": found.equal_values,
        "differences": [
            {
                "kind": change.kind,
                "path": change.path,
                "a": change.a,
                "b": change.b,
                "elements": change.elements,
                "different": None if change.distance is None else change.distance.different,
                "max_abs": None if change.distance is None else change.distance.largest,
                "non_finite": None if change.distance is None else change.distance.non_finite,
            }
            for change in found.changes
        ],
    }
