"""A moment in which the main thread runs no operation of torch, without asking it to call us.

Owns:    a call that the interpreter makes in the main thread, between two of its instructions.
Holds:   what an operation of that thread changed before such a moment, torch has counted (`Tensor._version`): it does
         so when the operation is over. A moment inside one (a dispatch mode, an operation written in Python) does not
         count. Nothing of ours is Python code in that call: `torch.compile` would compile it, and a lock might be held.
         Nothing in it imports: it may come in a function whose builtins are empty, as that of every named tuple is.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

_FIRST_SECONDS: Final = 0.001
_LAST_SECONDS: Final = 0.1
_MOST_ASKED: Final = 8
"""Moments asked for and not there yet: the interpreter has room for 32 such calls of everybody."""
_spare: Final[list[tuple[deque[bool], Any]]] = []
"""Calls that nobody uses, with where they note moments: they are never freed, so the next one to wait takes them."""


class Between:
    """For one thread that waits. Constructing only assigns."""

    def __init__(self) -> None:
        self._asked = self._heard = 0
        self._moments: deque[bool] = deque()
        """Those that were not heard of yet: whether each was inside an operation."""
        self._call: Any = None

    def close(self) -> None:
        """Nobody waits any more."""
        self._is_past(self._asked + 1)
        if self._call is not None and self._heard == self._asked:  # else a moment may still be noted there
            _spare.append((self._moments, self._call))
        self._moments, self._call = deque(), None
        self._asked = self._heard = 0

    def wait(self, is_over: threading.Event) -> bool:
        """Until the main thread was between two operations. False: `is_over` was set first."""
        pause, awaited = _FIRST_SECONDS, self._ask()
        while not is_over.wait(pause):
            pause = min(_LAST_SECONDS, 1.5 * pause)
            if awaited and self._is_past(awaited):
                return True
            if not awaited or self._heard >= awaited:
                awaited = self._ask()
        return False

    def _is_past(self, awaited: int) -> bool:
        """Whether this moment, or one after it, was between two operations."""
        found = False
        while self._moments:
            is_inside = self._moments.popleft()
            self._heard += 1
            found = found or (self._heard >= awaited and not is_inside)
        return found

    def _ask(self) -> int:
        """The number of the moment to wait for; 0: there is no room to ask for one now."""
        if self._call is None:
            self._moments, self._call = _spare.pop() if _spare else _kept()
        if self._asked - self._heard < _MOST_ASKED and not ctypes.pythonapi.Py_AddPendingCall(self._call, None):
            self._asked += 1
            return self._asked
        return 0


def _noting(moments: deque[bool]) -> Iterator[bool]:
    """Each `next` notes whether this thread is inside an operation, and is False: a call that succeeded."""
    key = torch._C.DispatchKey.ADInplaceOrView  # its name instead would be converted by an import
    is_inside = partial(torch._C._dispatch_tls_is_dispatch_key_excluded, key)
    return map(bool, map(moments.append, iter(is_inside, None)))


def _kept() -> tuple[deque[bool], Any]:
    """As the interpreter calls it. Never freed: a call that was asked for may come at the very end of the process."""
    moments: deque[bool] = deque()
    call = ctypes.CFUNCTYPE(ctypes.c_int)(_noting(moments).__next__)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
    return moments, call
