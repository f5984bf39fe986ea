"""`stepwell export`: one checkpoint as one file or folder for other tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from stepwell.errors import ConfigError
from stepwell.events.progress_bar import bar
from stepwell.tools.cli import wording
from stepwell.tools.cli.locate import locate, step_option
from stepwell.tools.cli.output import json_option, print_json, print_wrapped
from stepwell.tools.interchange.new_file import Written

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _parse_size(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?B?)", text)
    number = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match is not None else 0
    if not number:
        raise click.BadParameter(f"{text!r} is not a size; give one like 5GB or 500MB")
    return number


@click.command()
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@step_option
@click.option("--only", metavar="NAME", help="Export only this tracked object, such as model; names lose that prefix.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch", "hf", "dcp"]),
    default="safetensors",
    show_default=True,
    help="torch: includes plain values, for torch.load(weights_only=True); needs torch, and memory "
    "for the state. hf: a folder of safetensors files with an index, for one module (--only, or "
    "model). dcp: a folder for torch.distributed.checkpoint.load; needs torch.",
)
@click.option(
    "--shard-size", callback=_parse_size, metavar="SIZE", help="With hf: bytes per file, such as 5GB (default)."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
def export(
    run: str,
    out: Path,
    step: int | None,
    only: str | None,
    form: str,
    shard_size: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write one checkpoint of RUN to OUT, a file or a folder. Every byte is checked on the way.

    Without a step: the checkpoint that a restart would use. OUT appears complete or not at all. A checkpoint of many
    ranks is written as that of one, with whole tensors.
    """
    write = _writer(form, shard_size)
    found = locate(run, step)
    whole = found.whole()
    with bar("exporting", whole.tensor_bytes) as progress:
        written = write(whole, out, only=only, force=force, on_bytes=progress.add)
    if as_json:
        print_json(
            {
                "checkpoint": found.label,
                "step": found.entry.id.step,
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
    print_wrapped(f"wrote {out}: {tensors} of step {found.entry.id.step}, {wording.size(written.nbytes)}", indent="  ")
    for note in written.notes:
        print_wrapped(f"note: {note}", indent="  ")


def _writer(form: str, shard_bytes: int | None) -> Callable[..., Written]:
    if shard_bytes is not None and form != "hf":
        raise ConfigError(f"--shard-size needs --format hf; {form} writes one file")
    if form == "hf":
        from stepwell.tools.interchange.hf_folder import write_hf

        more: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
        return partial(write_hf, **more)
    if form == "dcp":
        from stepwell.tools.interchange.dcp_folder import write_dcp

        return write_dcp
    if form == "torch":
        from stepwell.tools.interchange.torch_file import write_torch

        return write_torch
    from stepwell.tools.interchange.safetensors_file import write_safetensors

    return write_safetensors
