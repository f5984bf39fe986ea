"""A checkpoint as one file for `torch.load`, also with `weights_only=True`.

Owns:    bringing the state into memory, without any of the user's classes, and `torch.save`.
Holds:   tensors have type, shape, strides, ties and bytes of the checkpoint; the file needs neither stepwell nor the
         user's code to be read. Needs as much memory as the state is large.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.errors import ConfigError
from stepwell.restore.whole import Whole
from stepwell.storage.format.record import LeafEntry
from stepwell.tools.interchange.merged import part
from stepwell.tools.interchange.new_file import Written, check_target, new_file
from stepwell.tools.interchange.outline import outline
from stepwell.tools.interchange.plain import Plain, change_notes, simplify
from stepwell.tools.interchange.reading import OnBytes, deliver_leaves, entries_of, own_notes

if TYPE_CHECKING:
    import torch


def write_torch(whole: Whole, out: Path, *, only: str | None, force: bool, on_bytes: OnBytes | None = None) -> Written:
    """Export a checkpoint, or one tracked object of it. Raises DamagedError and leaves no file if a byte is wrong."""
    check_target(out, force=force)
    encoded = part(whole, only)
    wanted = {leaf for _, leaf in outline(encoded).leaves()}
    plain = simplify(encoded)
    try:
        import torch
    except ImportError:
        raise ConfigError(
            "--format torch needs torch, which is not installed here; --format safetensors does not"
        ) from None
    from stepwell.training.state.flatten import unflatten

    tensors = _read_tensors(whole, wanted, on_bytes)
    _add_arrays(plain, tensors)
    state = unflatten(plain.encoded, tensors.__getitem__)
    with new_file(out, force=force) as temporary:
        torch.save(state, temporary)
    return Written(out.stat().st_size, len(wanted), [*change_notes(plain), *own_notes(whole, wanted)])


def _read_tensors(whole: Whole, wanted: set[str], on_bytes: OnBytes | None) -> dict[str, torch.Tensor]:
    """Verified leaves as tensors in host memory."""
    entries = entries_of(whole, wanted)
    buffers = {entry.name: bytearray(entry.end - entry.start) for entry in entries}

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        with memoryview(buffers[leaf.name]) as view:
            view[offset : offset + len(data)] = data

    deliver_leaves(whole, wanted, deliver, on_bytes)
    return {entry.name: as_tensor(buffers[entry.name], entry) for entry in entries}


def as_tensor(data: bytearray, entry: LeafEntry) -> torch.Tensor:
    """The bytes of a whole leaf as a tensor, which uses their memory if it lies row by row."""
    import torch

    from stepwell.training.state.flatten import dtype_from
    from stepwell.training.state.strides import as_words

    dtype = dtype_from(entry.dtype)
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    found = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(entry.shape)
    if entry.strides is None:
        return found
    made = torch.empty_strided(entry.shape, entry.strides, dtype=dtype)
    as_words(made).copy_(as_words(found))
    return made


def _add_arrays(plain: Plain, tensors: dict[str, torch.Tensor]) -> None:
    """Arrays in the shape and type that numpy had them in."""
    from stepwell.training.state.flatten import dtype_from

    for name, array in plain.arrays.items():
        tensor = tensors[array.leaf]
        if array.dtype is not None and tensor.numel():
            tensor = tensor.view(dtype_from(array.dtype))
        tensors[name] = tensor if array.shape is None or not tensor.numel() else tensor.reshape(array.shape)
