"""How the elements of a tensor lie in memory, which goes with the state: fused kernels pair memory with memory.

Holds:   strides are those of a dense tensor, the one that torch would make like it; a tensor with gaps, or one that
         shares its elements, comes back dense. None: row by row, as nearly all tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from stepwell.training.state.flatten import Leaf

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Strides = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Strides:
    """Strides of a tensor that lies row by row."""
    return _row_major(tuple(shape))


@lru_cache(maxsize=1 << 12)
def _row_major(shape: Strides) -> Strides:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(1, size)
    return tuple(reversed(found))


def dense_strides(tensor: torch.Tensor) -> Strides:
    """Those of a tensor that torch makes like this one."""
    return torch.empty_like(tensor, device="meta").stride()


def strides_of(leaf: Leaf) -> Strides | None:
    """Strides of the whole tensor, as if this process held all of it; None: row by row."""
    held = leaf.local
    shape, whole = tuple(held.shape), leaf.global_shape or tuple(held.shape)
    plain = row_major(shape)
    if held.stride() == plain or not held.numel():
        return None
    dense = dense_strides(held)
    return None if dense == plain else stretch(dense, shape, whole)


def stretch(strides: Strides, shape: Sequence[int], onto: Sequence[int]) -> Strides:
    """Dense strides of another shape whose dimensions follow each other in memory as these do."""
    if tuple(shape) == tuple(onto):
        return strides
    found, step = [0] * len(shape), 1
    # Innermost first. A dimension of size 1 with the stride of another one lies inside that.
    for dimension in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d], -d)):
        found[dimension] = step
        step *= max(1, onto[dimension])
    return tuple(found)


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether one place in memory may be several of its elements: then it cannot be filled one by one."""
    step = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= step:
                return bool(tensor.numel())
            step += stride * (size - 1)
    return False


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Of an expanded tensor, what was expanded: each dimension that repeats one element has size 1."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers of the elements' width: no type is special, and no bit pattern."""
    kind = _WORDS.get(tensor.element_size())
    return tensor if kind is None else tensor.view(kind)


def fill(tensor: torch.Tensor, start: int, words: torch.Tensor) -> None:
    """Put elements to positions from `start` on, counted row by row, wherever these lie in memory.

    Both are of the same type. Several threads may fill different ranges of one tensor.
    """
    for place, count in _ranges(tensor, start, words.numel()):
        place.copy_(words[:count].view(place.shape), non_blocking=True)
        words = words[count:]


def _ranges(tensor: torch.Tensor, start: int, count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts of a tensor that follow each other row by row, and the elements in each."""
    if not count:
        return
    if tensor.dim() < 2:
        yield tensor[start : start + count] if tensor.dim() else tensor, count
        return
    row = tensor[0].numel()
    first, skipped = divmod(start, row)
    if skipped:
        head = min(row - skipped, count)
        yield from _ranges(tensor[first], skipped, head)
        first, count = first + 1, count - head
    rows, rest = divmod(count, row)
    if rows:
        yield tensor[first : first + rows], rows * row
    if rest:
        yield from _ranges(tensor[first + rows], 0, rest)
