"""Many device-to-host copies as one launch: a CUDA graph of copy nodes, made without capturing anything.

Holds:   built and launched from any thread, whatever the training thread captures meanwhile. Where the library is not
         found (another vendor) the copies are issued one by one: the same bytes, some milliseconds more of the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stepwell.training.cuda.runtime import DEVICE_TO_HOST, forget_error, runtime

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target in page-locked memory and source on the device, both flat, of the same type and size."""


class CopyBatch:
    """Copies that are launched together. With `prepare` as one unit, which pays from the second launch on."""

    def __init__(self, copies: Sequence[Copy], *, prepare: bool) -> None:
        self._copies = copies
        self._launchable: ctypes.c_void_p | None = None
        if prepare and len(copies) > 1 and runtime() is not None:
            self._launchable = self._build()

    def _build(self) -> ctypes.c_void_p | None:
        library, graph, before = runtime(), ctypes.c_void_p(), ctypes.c_void_p()
        if library.cudaGraphCreate(ctypes.byref(graph), 0):
            forget_error()
            return None
        try:
            for number, (target, source) in enumerate(self._copies):
                node = ctypes.c_void_p()
                where, whence = target.data_ptr(), source.data_ptr()
                if library.cudaGraphAddMemcpyNode1D(
                    ctypes.byref(node), graph, ctypes.byref(before) if number else None, min(1, number),
                    where, whence, source.nbytes, DEVICE_TO_HOST,
                ):  # fmt: skip
                    forget_error()
                    return None
                before = node
            launchable = ctypes.c_void_p()
            if library.cudaGraphInstantiateWithFlags(ctypes.byref(launchable), graph, 0):
                forget_error()
                return None
            return launchable
        finally:
            library.cudaGraphDestroy(graph)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Issue all copies on a stream, which must be the current one. Raises RuntimeError."""
        if self._launchable is None:
            for target, source in self._copies:
                target.copy_(source, non_blocking=True)
            return
        status = runtime().cudaGraphLaunch(self._launchable, stream.cuda_stream)
        if status:
            forget_error()
            raise RuntimeError(f"CUDA refused to launch the copies of a snapshot (error {status})")

    def close(self) -> None:
        """Let go of the graph. It must not be running."""
        if self._launchable is not None:
            runtime().cudaGraphExecDestroy(self._launchable)
            self._launchable = None
