"""Which way a snapshot is taken: beside training, by a copy on the device first, or blocking.

Owns:    what was asked for, what was measured at the gate, and the event when the way changes.
Holds:   on the device only where there is room; after a void snapshot the next one is blocking.
"""

from __future__ import annotations

from stepwell.events import journal, run_events
from stepwell.training.snapshot.arrange import Arrangement
from stepwell.training.snapshot.device_copy import Strategy, spare_bytes
from stepwell.training.snapshot.inflight import Inflight

_DEVICE_COPY_SECONDS, _DEVICE_COPY_RATE = 0.002, 2e12
"""What a copy on the device costs at best: launching it, and bytes a second."""


class Choice:
    """Of one run."""

    def __init__(self, wanted: str, log: journal.EventLog) -> None:
        self._wanted, self._log = wanted, log
        self.is_blocking_next = False
        self._present: Strategy | None = None
        self._waits: dict[str, float] = {}

    def choose(self, arrangement: Arrangement, step: int, *, is_coded: bool = False) -> Strategy:
        """Blocking after a void snapshot; on the device where that is wished for, or measured to wait less.

        is_coded:  symbols are made of the live tensors: a clone of them would help nobody
        """
        if is_coded:
            return "blocking" if self._wanted == "blocking" else "overlap"
        if self.is_blocking_next or self._wanted == "blocking":
            self.is_blocking_next = False
            return "blocking"
        devices = {*arrangement.fixed.device, *arrangement.rest.device}
        if not devices and self._wanted == "device":
            self._switch("overlap", step, "snapshot='device' has no effect: the state has no tensors on a device")
        if not devices or self._wanted == "overlap":
            return "overlap"
        wanted: Strategy = "overlap"
        if self._wanted == "device":
            wanted = "device"
        elif self._waits.get("overlap", 0.0) > self._waits.get("device", _least_wait(arrangement)):
            wanted = "device"  # the gate was seen to wait; cloning on the device is tried, then the lesser wait stays
        if wanted == "device":
            for device in devices:
                need = arrangement.device_bytes(device)
                spare = spare_bytes(device)
                if need > spare:
                    reason = f"{need} bytes on {device} do not fit into the {max(0, spare)} spare ones"
                    self._switch("overlap", step, reason)
                    return "overlap"
            self._switch("device", step, "asked for" if self._wanted == "device" else "training waits less for it")
        else:
            self._switch("overlap", step, "training waits less for it" if self._waits else "nothing is measured yet")
        return wanted

    def _switch(self, strategy: Strategy, step: int, reason: str) -> None:
        if strategy != self._present:
            self._present = strategy
            self._log.emit(run_events.Strategy(step=step, strategy=strategy, reason=reason))

    def measure(self, inflight: Inflight) -> None:
        """A snapshot is over, and what the gate waited for it may be known."""
        known = [wait for wait in inflight.waits() if wait is not None]
        if known and not inflight.is_symbols:
            self._waits[inflight.strategy] = max(known)


def _least_wait(arrangement: Arrangement) -> float:
    """A wait at the gate that copying on the device could hardly undercut, before that was ever tried."""
    devices = {*arrangement.fixed.device, *arrangement.rest.device}
    return _DEVICE_COPY_SECONDS + max(arrangement.device_bytes(device) for device in devices) / _DEVICE_COPY_RATE
