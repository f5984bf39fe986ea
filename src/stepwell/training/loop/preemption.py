"""Being told to leave: signals, and notices of a machine that goes away.

Owns:    the handlers of SIGTERM, SIGINT and SIGUSR1 while the run is open, the thread that looks for a notice, and the
         end of the grace time.
Not:     how a checkpoint is made (checkpointer).
Holds:   a handler only notes what it was told: everything else waits until the iteration is over. Handlers that were
         there before are called, and are back after `stop`, and in forked children. When the grace time is over the
         process is gone, or after Ctrl-C interrupted; its agent finishes what is complete. A main thread that is busy
         in C sees no signal: the time begins when it returns to Python.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from stepwell.events import journal, loop_events, run_events

REQUEUE: Final = 75
"""Exit status (EX_TEMPFAIL): told to leave, the run is to be started again."""
PEER_DIED: Final = 143
"""Exit status after SIGTERM of a launcher without a notice: another process of the run died."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 3600.0
_STUCK_SECONDS: Final = 5.0
_LAST_WORDS: Final = 0.3
_TO_CLOSE: Final = 1.0


@dataclass(frozen=True)
class Order:
    """Who told us to leave, and when it has to be over."""

    by: str
    at: float
    deadline: float
    status: int

    @property
    def is_for_peer(self) -> bool:
        """A launcher ends everybody because one died: there is no time, and no sense, in saving."""
        return self.status == PEER_DIED

    @property
    def seconds_left(self) -> float:
        """Until the process is gone."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def seconds_for_disk(self) -> float:
        """That may be waited for a write, so that there is time left to close."""
        return max(0.0, self.seconds_left - _TO_CLOSE)


class Leave:
    """Listens for orders to leave. Constructing only assigns."""

    def __init__(
        self,
        log: journal.EventLog,
        step: Callable[[], int],
        on_deadline: Callable[[], None],
        grace: float | None,
        notice: Any,
    ) -> None:
        self._log = log
        self._step = step
        self._grace = grace
        self._notice = os.environ.get("STEPWELL_NOTICE") if notice is None else notice
        self._on_deadline = on_deadline
        self._previous: dict[int, Any] = {}
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A signal handler may ring it in the middle of anything, and there is no descriptor that could be closed."""
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._pid = 0
        self._signals = 0
        self._raised: BaseException | None = None
        self.order: Order | None = None
        self.has_told = False
        """What became of the last step was logged."""
        self._finish_between: Callable[[Order], bool] = lambda order: True

    def listen(self, finish_between: Callable[[Order], bool] = lambda order: True) -> None:
        """Take the signals over, where that is possible, and look for notices.

        finish_between:  make the last checkpoint if no step is under way, since another one of this process leaves.
                         False: a step is under way
        """
        self._finish_between = finish_between
        if self._grace is None:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stepwell-leave")
        self._thread.start()
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only; notices work everywhere
        foreign = _caught_in_c()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is None or before is signal.SIG_IGN or (before is signal.SIG_DFL and number in foreign):
                continue  # ignored on purpose (nohup), or somebody's in C, which could not be called from here
            self._previous[number] = before
            signal.signal(number, self._on_signal)
        _listening.add(self)

    def take(self, by: str) -> Order:
        """Somebody else was told, and so are we. Returns the order that holds."""
        now = time.monotonic()
        if self.order is None:
            self.order = Order(by, now, now + (self._grace or _STUCK_SECONDS), REQUEUE)
            if self._thread is not None:
                self._bell.put(None)
        return self.order

    def stop(self) -> None:
        """Give the signals back: at once in the main thread, else each when it comes."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            for number, before in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, before)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._bell.put(None)
            thread.join(_STUCK_SECONDS)  # longer only in a notice of the user's that hangs: it ends with the process

    def forget(self) -> None:
        """In a forked child: a worker that hangs in C would never see a handler of Python, and could not be ended."""
        for number, before in self._previous.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def finish(self, order: Order, save: Callable[[float], None], wait: Callable[[float], None]) -> None:
        """An iteration is over: make its checkpoint, unless it is made, and wait for the disk while there is time."""
        step, is_durable, reason = (
            self._step(),
            False,
            "another process of the run died; the agent writes the complete snapshots",
        )
        if not order.is_for_peer:
            try:
                save(order.seconds_for_disk)
                wait(order.seconds_for_disk)
                is_durable, reason = True, f"step {step} is durable" if step else "no step was done yet"
            except Exception as error:  # leaving comes first
                reason = f"step {step} is not durable yet: {error}"
        self._say(order, reason, is_durable=is_durable)

    def _say(self, order: Order, reason: str, *, is_durable: bool) -> None:
        self.has_told, seconds = True, time.monotonic() - order.at
        self._log.emit(
            run_events.Left(step=self._step(), by=order.by, durable=is_durable, seconds=seconds, reason=reason)
        )

    def finish_others(self) -> bool:
        """Other Checkpointers of this process were told too. False: the step of one of them is not over yet."""
        others = [leave for leave in _listening if leave is not self and leave.order is not None and not leave._is_over]
        left = [leave for leave in others if leave.order is not None and not leave._finish_between(leave.order)]
        if left:
            self._log.emit(loop_events.LeavesLater(step=self._step()))
        return not left

    def exit(self) -> None:
        """The checkpoint is made: leave as was asked. Raises."""
        assert self.order is not None
        if self._raised is not None:
            raise self._raised  # what a handler before ours wanted
        if self.order.by == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(self.order.status)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # Ctrl-C reaches all: the loader's forked workers are needed until the iteration is over
        if self._is_over:
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
            return
        self._signals += 1
        if self._signals > 1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # the second Ctrl-C: now
            return
        self._take(number)
        before = self._previous[number]
        if callable(before) and before is not signal.default_int_handler:
            try:
                before(number, frame)
            except BaseException as error:  # it wants to leave: after the checkpoint
                self._raised = error

    def _take(self, number: int) -> None:
        """A signal (0: a notice). No locks here: it may run in the middle of anything, and in two threads at once."""
        assert self._grace is not None
        now, status, grace = time.monotonic(), REQUEUE, self._grace
        if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ and not self._is_noticed():
            status, grace = PEER_DIED, min(grace, _STUCK_SECONDS)
        if self.order is None:
            self.order = Order(signal.Signals(number).name if number else "notice", now, now + grace, status)
            self._bell.put(None)

    def _is_noticed(self) -> bool:
        if self._notice is None:
            return False
        try:
            return bool(self._notice()) if callable(self._notice) else os.path.exists(self._notice)
        except Exception:  # a metadata service that does not answer is no notice
            return False

    def _watch(self) -> None:
        """Thread: looks for notices, and after an order for the end of the grace time."""
        while not self._is_over and self.order is None:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=_IDLE_SECONDS if self._notice is None else _POLL_SECONDS)
            if self._is_noticed():
                self._take(0)
        if self.order is not None:
            order, left = self.order, self.order.seconds_left
            self._log.emit(run_events.Told(step=self._step(), by=order.by, grace=left, saves=not order.is_for_peer))
            self._wait_out(self.order)

    def _wait_out(self, order: Order) -> None:
        """Until the process is gone, one way or the other."""
        while not self._is_over and order.seconds_left:
            time.sleep(min(order.seconds_left, 0.05))
        if self._is_over:
            return
        self._say(order, "the grace time is over; the agent writes the complete snapshots", is_durable=False)
        self._on_deadline()
        if order.by == "SIGINT":
            # A person is there, maybe in a notebook: an exception, not the end of everything.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        time.sleep(_LAST_WORDS)
        os._exit(order.status)


_listening: weakref.WeakSet[Leave] = weakref.WeakSet()


def _after_fork() -> None:
    for leave in list(_listening):
        leave.forget()


os.register_at_fork(after_in_child=_after_fork)


def _caught_in_c() -> set[int]:
    """Signals that somebody catches below Python: `signal.getsignal` does not know of them."""
    try:
        with open("/proc/self/status") as file:
            mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return set()
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
