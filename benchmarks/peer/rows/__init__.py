"""One row of the table per way of saving. A row's module is imported only in the child that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from peer.rows.base import Row

# name -> (module, class). The order is the table's; the run shuffles it.
ROWS: Final = {
    "stepwell": ("stepwell_row", "Stepwell"),
    "torch.save": ("plain", "TorchSave"),
    "safetensors": ("plain", "Safetensors"),
    "dcp-save": ("dcp", "Save"),
    "dcp-save-threads": ("dcp", "SaveThreads"),
    "dcp-thread": ("dcp", "AsyncThread"),
    "dcp-thread-reused": ("dcp", "AsyncThreadReused"),
    "dcp-process": ("dcp", "AsyncProcess"),
    "dcp-process-shm": ("dcp", "AsyncProcessShared"),
    "torch_checkpointing": ("others", "TorchCheckpointing"),
    "torch_checkpointing-sync": ("others", "TorchCheckpointingSync"),
    "torchsnapshot": ("others", "SnapshotTake"),
    "torchsnapshot-async": ("others", "SnapshotAsyncTake"),
    "nvrx-async": ("resilient", "Nvrx"),
    "dlrover": ("resilient", "DLRover"),
    "lm-resiliency": ("resilient", "LmResiliency"),
    "lightning-async": ("others", "LightningAsync"),
    "orbax-async": ("others", "Orbax"),
}


def row_class(name: str) -> type[Row]:
    """Raises ImportError where the peer is not installed."""
    module, attribute = ROWS[name]
    return getattr(import_module(f"peer.rows.{module}"), attribute)
