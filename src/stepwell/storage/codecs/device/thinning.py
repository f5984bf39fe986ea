"""On the device: of packed symbols, marks and those bytes that are not zero, so that a fifth of them is copied.

Owns:    room for both.   Before: `kernels.encode` made the symbols.   After: `device` copies what is smaller.
Holds:   the bytes of `sparse.thin`. All of it is allocated once, but for room to join symbols with gaps between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell.storage.codecs.device import kernels
from stepwell.storage.codecs.sparse import is_sparse, marks_nbytes


class Thinner:
    """For one buffer of symbols. Constructing makes room on its device."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed
        self._marks = packed.new_empty(marks_nbytes(packed.numel()))
        self._values = packed.new_empty(packed.numel() // 2)
        self._joined: torch.Tensor | None = None
        blocks = -(-packed.numel() // kernels.BLOCK)
        self._counts = packed.new_empty(blocks, dtype=torch.int32)
        self._ends = packed.new_empty(blocks, dtype=torch.int64)

    def thin(self, spans: Sequence[slice]) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """Of the symbols that are used: bytes, marks, values; until the next call. None: they are not sparse, or there
        is no room to join them. The host waits for the count, on the current stream.
        """
        data = self._join(spans)
        if data is None:
            return None
        nbytes = data.numel()
        blocks = -(-nbytes // kernels.BLOCK)
        counts, ends, values = self._counts[:blocks], self._ends[:blocks], self._values
        kernels.mark[(blocks,)](data, self._marks, counts, nbytes, BLOCK=kernels.BLOCK)
        torch.cumsum(counts, 0, out=ends)
        kernels.gather[(blocks,)](data, counts, ends, values, nbytes, values.numel(), BLOCK=kernels.BLOCK)
        count = int(ends[-1])
        return (nbytes, self._marks[: marks_nbytes(nbytes)], values[:count]) if is_sparse(count, nbytes) else None

    def _join(self, spans: Sequence[slice]) -> torch.Tensor | None:
        nbytes = sum(span.stop - span.start for span in spans)
        if nbytes in (0, self._packed.numel()):  # of none, what comes of it does not matter
            return self._packed
        if self._joined is None:
            try:
                self._joined = torch.empty_like(self._packed)
            except torch.OutOfMemoryError:
                return None
        joined = self._joined[:nbytes]
        torch.cat([self._packed[span] for span in spans], out=joined)
        return joined
