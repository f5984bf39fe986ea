from __future__ import annotations

from tests.ranks.conftest import make_job, server, straight

__all__ = ["make_job", "server", "straight"]
