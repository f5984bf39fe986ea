"""The global random generators, held from one moment of a process to another of the same one.

A restore sets them; what a script does between that and its first batch (building loaders, say) may draw from them,
which an uninterrupted run does not do at that point. So they are set again when the first batch is asked for.
"""

from __future__ import annotations

import random
import sys

import torch


class Generators:
    """A copy of Python's, NumPy's (where it is loaded) and torch's generators, taken when it is made."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def set(self) -> None:
        """Bring the generators back to the copy."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
