"""The process that a run belongs to, and its forked children.

Owns:    the knowledge whether this process is that one.
Holds:   a forked child has a copy of the training process, without its threads, its memory for snapshots and its agent.
         There, hooks do nothing, with one warning, and calls are refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from stepwell.errors import ConfigError
from stepwell.events.run_events import logger


@dataclass
class Home:
    """Of one Checkpointer. Constructing notes the process."""

    place: str
    pid: int = field(default_factory=os.getpid)
    _has_warned: bool = False

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise ConfigError in a forked child."""
        if not self.is_here:
            raise ConfigError(
                f"{self.place}: this Checkpointer was created in process {self.pid}, and process "
                f"{os.getpid()} was forked from it: use it there, or create another one with its own "
                "directory after the fork",
                path=self.place,
            )

    def is_hooked(self) -> bool:
        """Whether a hook is to do its work. False in a forked child, which warns once."""
        if self.is_here:
            return True
        if not self._has_warned:  # not into the event file, which belongs to the run
            self._has_warned = True
            logger.warning(
                "process %d was forked from process %d, which trains %s: its optimizer steps are not part of "
                "that run, and stepwell saves nothing of it",
                os.getpid(),
                self.pid,
                self.place,
            )
        return False
