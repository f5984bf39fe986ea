"""`stepwell export`: one checkpoint as one file for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from stepwell.bar import bar
from stepwell.cli import wording
from stepwell.cli.locate import locate, step_option
from stepwell.cli.output import json_option, print_json, print_wrapped


@click.command()
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@step_option
@click.option("--only", metavar="NAME", help="Only this tracked object, such as model; names without that prefix.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="torch: also plain values, for torch.load(weights_only=True); needs torch, and memory for the state.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
@json_option
def export(run: str, out: Path, step: int | None, only: str | None, form: str, force: bool, as_json: bool) -> None:
    """Write one checkpoint of RUN to the file OUT. Every byte is checked on the way.

    Without a step: the checkpoint that a restart would use. OUT appears complete or not at all.
    """
    from stepwell.interchange.safetensors_file import write_safetensors
    from stepwell.interchange.torch_file import write_torch

    found = locate(run, step)
    record = found.record()
    write = write_safetensors if form == "safetensors" else write_torch
    with bar("exporting", sum(leaf.end - leaf.start for leaf in record.leaves)) as progress:
        written = write(record, found.entry.path, out, only=only, force=force, on_bytes=progress.add)
    if as_json:
        print_json(
            {
                "checkpoint": found.label,
                "step": record.id.step,
                "out": str(out),
                "format": form,
                "only": only,
                "nbytes": written.nbytes,
                "tensors": written.tensors,
                "notes": written.notes,
            }
        )
        return
    tensors = wording.count(written.tensors, "tensor")
    print_wrapped(f"wrote {out}: {tensors} of step {record.id.step}, {wording.size(written.nbytes)}", indent="  ")
    for note in written.notes:
        print_wrapped(f"note: {note}", indent="  ")
