"""Calls into CUDA's runtime library that torch does not offer, or not without letting other threads run in between.

Owns:    finding the library that torch loaded, and the types of its functions.
Holds:   a call that fails leaves no error behind: torch would raise it at the next thing it does in that thread.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

import torch

HOST_TO_DEVICE: Final = 1
DEVICE_TO_HOST: Final = 2
PORTABLE: Final = 1
"""Page-locked for every device."""


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The library; None if it is not loaded (no CUDA, another vendor) or lacks something."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        library = ctypes.CDLL(_path())
        library.cudaGraphCreate.argtypes = [pointer, ctypes.c_uint]
        library.cudaGraphAddMemcpyNode1D.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, number]
        library.cudaGraphInstantiateWithFlags.argtypes = [pointer, pointer, ctypes.c_ulonglong]
        library.cudaGraphLaunch.argtypes = [pointer, pointer]
        library.cudaGraphDestroy.argtypes = library.cudaGraphExecDestroy.argtypes = [pointer]
        library.cudaGetLastError.argtypes = []
    except (OSError, AttributeError):
        return None
    return library


@lru_cache(maxsize=1)
def quick_copy() -> Any:
    """cudaMemcpyAsync(target, source, bytes, kind, stream), which keeps the interpreter's lock; None as above.

    For copies that only join a queue: of many threads, one that lets go of the lock waits for all the others.
    """
    try:
        function = ctypes.PyDLL(_path()).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return function


def _path() -> str:
    with open("/proc/self/maps") as file:
        found = next((line.split()[-1] for line in file if "libcudart.so" in line), None)
    if found is None:
        raise OSError("torch has not loaded it")
    return found


def forget_error() -> None:
    """After a call that failed, and whose failure is dealt with."""
    if runtime() is not None:
        runtime().cudaGetLastError()


def lock_pages(address: int, nbytes: int, flags: int = 0) -> bool:
    """Page-lock memory, so that copies run beside compute. False if the driver refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags)):
        forget_error()
        return False
    return True


def unlock_pages(address: int) -> None:
    """Undo `lock_pages`, before the memory goes: the driver keeps it by address."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        forget_error()
