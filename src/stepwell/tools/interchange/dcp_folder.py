"""A checkpoint as a folder for torch.distributed.checkpoint, in one process, a tensor at a time.

Owns:    what DCP's own writer is given to write.
Holds:   the folder is what stock `dcp.save` writes, so that stock `dcp.load` and `dcp_to_torch_save` read it.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.errors import ConfigError
from stepwell.restore.whole import Whole
from stepwell.tools.interchange.dcp_state import Behind, flat_state, own_errors
from stepwell.tools.interchange.merged import part
from stepwell.tools.interchange.new_file import Written, check_folder, new_folder
from stepwell.tools.interchange.plain import change_notes, simplify
from stepwell.tools.interchange.reading import OnBytes, own_notes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


def write_dcp(whole: Whole, out: Path, *, only: str | None, force: bool, on_bytes: OnBytes | None = None) -> Written:
    """Export a checkpoint, or one tracked object under its name. Raises DamagedError and leaves no folder then."""
    check_folder(out, force=force)
    chosen = part(whole, None) if only is None else {only: part(whole, only)}
    plain = simplify(chosen, keep_arrays=True)
    try:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError:
        raise ConfigError("--format dcp needs torch, which is not installed here; --format hf does not") from None
    flat = flat_state(plain.encoded)
    with contextlib.closing(Behind(whole, flat)) as behind, new_folder(out, force=force) as temporary:
        with own_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group: none is needed
            writer = FileSystemWriter(temporary)
            save({}, storage_writer=writer, planner=_planner(behind, on_bytes), no_dist=True)
        nbytes = sum(path.stat().st_size for path in temporary.iterdir())
    leaves = set(flat.leaves.values())
    return Written(nbytes, len(flat.leaves), [*change_notes(plain), *own_notes(whole, leaves)])


def _planner(behind: Behind, on_bytes: OnBytes | None) -> DefaultSavePlanner:
    """DCP's planner over what stands behind the keys: tensors are read when they are written."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            self.mappings = behind.flat.paths
            self.is_coordinator = is_coordinator
            self.state_dict = dict.fromkeys(behind.flat.values)
            for key in behind.flat.leaves:
                dtype, shape = behind.shape(key)
                self.state_dict[key] = torch.empty(shape, dtype=dtype, device="meta")

        def lookup_object(self, index: MetadataIndex) -> Any:
            if index.fqn in behind.flat.values:
                return behind.value(index.fqn)
            tensor = behind.tensor(index.fqn)
            if on_bytes is not None:
                on_bytes(tensor.nbytes)
            return tensor

    return Planner()
