"""`from cf_manager import CFManager, CFMode`."""

from stepwell.adapters.checkfreq import CFManager, CFMode

__all__ = ["CFManager", "CFMode"]
