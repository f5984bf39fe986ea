"""`from cf_iterator import CFIterator`; and the module that does this first counts on in its loops after a resume.

The original's script computes its learning rate from `enumerate(train_loader)`, which would begin at 0 in mid-epoch. So
the name `enumerate` of that module, and of no other, becomes the one of `stepwell.adapters.checkfreq`.
"""

import sys

from stepwell.adapters.checkfreq import CFIterator, enumerate

__all__ = ["CFIterator"]

_frame = sys._getframe(1)
while _frame.f_back is not None and _frame.f_globals.get("__name__", "").startswith("importlib"):
    _frame = _frame.f_back
_frame.f_globals.setdefault("enumerate", enumerate)
del _frame
