"""A checkpoint as one file for `torch.load`, also with `weights_only=True`.

Owns:    bringing the state into memory, without any of the user's classes, and `torch.save`.
Holds:   tensors have type, shape, ties and bytes of the checkpoint; the file needs neither stepwell nor the user's
         code to be read. Needs as much memory as the state is large.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.errors import ConfigError
from stepwell.format.record import LeafEntry, Record
from stepwell.interchange.newfile import Written, check_target, new_file
from stepwell.interchange.outline import outline, part
from stepwell.interchange.plain import Plain, simplify
from stepwell.interchange.reading import OnBytes, deliver_leaves, entries_of

if TYPE_CHECKING:
    import torch

_MOST_NAMED = 3


def write_torch(
    record: Record, directory: Path, out: Path, *, only: str | None, force: bool, on_bytes: OnBytes | None = None
) -> Written:
    """Export a checkpoint, or one tracked object of it. Raises DamagedError and leaves no file if a byte is wrong."""
    check_target(out, force=force)
    encoded = part(record, only)
    wanted = {leaf for _, leaf in outline(encoded).leaves()}
    plain = simplify(encoded)
    try:
        import torch
    except ImportError:
        raise ConfigError(
            "--format torch needs torch, which is not installed here; --format safetensors does not"
        ) from None
    from stepwell.state.flatten import unflatten

    tensors = _read_tensors(record, directory, wanted, on_bytes)
    _add_arrays(plain, tensors)
    state = unflatten(plain.encoded, tensors.__getitem__)
    with new_file(out, force=force) as temporary:
        torch.save(state, temporary)
    return Written(out.stat().st_size, len(wanted), _notes(plain))


def _read_tensors(
    record: Record, directory: Path, wanted: set[str], on_bytes: OnBytes | None
) -> dict[str, torch.Tensor]:
    """Verified leaves as tensors in host memory."""
    import torch

    from stepwell.state.flatten import dtype_from

    entries = entries_of(record, wanted)
    buffers = {entry.name: bytearray(entry.end - entry.start) for entry in entries}

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        with memoryview(buffers[leaf.name]) as view:
            view[offset : offset + len(data)] = data

    deliver_leaves(record, directory, wanted, deliver, on_bytes)
    tensors = {}
    for entry in entries:
        buffer, dtype = buffers[entry.name], dtype_from(entry.dtype)
        if buffer:
            tensors[entry.name] = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(entry.shape)
        else:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
    return tensors


def _add_arrays(plain: Plain, tensors: dict[str, torch.Tensor]) -> None:
    """Arrays in the shape and type that numpy had them in."""
    from stepwell.state.flatten import dtype_from

    for name, array in plain.arrays.items():
        tensor = tensors[array.leaf]
        if array.dtype is not None and tensor.numel():
            tensor = tensor.view(dtype_from(array.dtype))
        tensors[name] = tensor if array.shape is None or not tensor.numel() else tensor.reshape(array.shape)


def _notes(plain: Plain) -> list[str]:
    if not plain.changes:
        return []
    some = ", ".join(plain.changes[:_MOST_NAMED])
    more = len(plain.changes) - _MOST_NAMED
    return [
        "written in plainer types, so that torch.load(weights_only=True) reads them: "
        + (f"{some} and {more} more" if more > 0 else some)
    ]
