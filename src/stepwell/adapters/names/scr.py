"""`import scr`: the very module `stepwell.adapters.scr`."""

import sys

from stepwell.adapters import scr

sys.modules[__name__] = scr
