"""Calls into CUDA's runtime library that torch does not offer: graphs of copies, made node by node.

Owns:    finding the library that torch loaded, and the types of its functions.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

DEVICE_TO_HOST: Final = 2


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The library; None if it is not loaded (no CUDA, another vendor) or lacks something."""
    try:
        with open("/proc/self/maps") as file:
            path = next((line.split()[-1] for line in file if "libcudart.so" in line), None)
        if path is None:
            return None
        library, pointer, size, number = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.cudaGraphCreate.argtypes = [pointer, ctypes.c_uint]
        library.cudaGraphAddMemcpyNode1D.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, number]
        library.cudaGraphInstantiateWithFlags.argtypes = [pointer, pointer, ctypes.c_ulonglong]
        library.cudaGraphLaunch.argtypes = [pointer, pointer]
        library.cudaGraphDestroy.argtypes = library.cudaGraphExecDestroy.argtypes = [pointer]
    except (OSError, AttributeError):
        return None
    return library
