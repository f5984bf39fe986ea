"""The runs of the crash tests, with chains."""

from tests.crash.conftest import make_run, reference, run, server

__all__ = ["make_run", "reference", "run", "server"]
