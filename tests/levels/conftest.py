"""One stack for each test, that ends what it started; and the jobs of the tests with many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.ranks.conftest import make_job, straight

__all__ = ["make_job", "stack", "straight"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
