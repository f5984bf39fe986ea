"""`from cf_checkpoint import CFCheckpoint`."""

from stepwell.adapters.checkfreq import CFCheckpoint

__all__ = ["CFCheckpoint"]
