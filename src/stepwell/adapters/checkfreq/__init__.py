"""CheckFreq's own interface (msr-fiddle/CheckFreq): a script that uses it runs with only its import lines changed.

manager       CFManager and CFMode: when to save, and the calls around it
iterator      CFIterator: CheckFreq's resumable iterator
saved         what a checkpoint of this interface holds
reader_size   how many samples an iterable says it has, in the words of DALI's iterators
generators    the global random generators, put aside and put back
moment        whether the state is still what a checkpoint holds
warned        an event as a Python warning
"""

from __future__ import annotations

from stepwell.adapters.checkfreq.iterator import CFIterator
from stepwell.adapters.checkfreq.manager import CFManager, CFMode, enumerate
from stepwell.adapters.checkfreq.saved import CFCheckpoint

__all__ = ["CFCheckpoint", "CFIterator", "CFManager", "CFMode", "enumerate"]
