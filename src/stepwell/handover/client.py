"""The trainer's end of the agent: start it, tell it, listen to it, replace it when it dies.

Owns:    the child process, the socket, one listening thread, and what must be said again to a new agent.
Holds:   no call here waits for the disk; an agent that is dead or stuck is replaced, and told of every snapshot that is
         not durable; no call waits for that either;
         the agent is started with exec, so it never imports the user's script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from stepwell.errors import AgentError
from stepwell.events import journal, run_events
from stepwell.handover import protocol
from stepwell.handover.agent_deaths import AgentsFail, Deaths, given_up, void_of
from stepwell.handover.channel import Channel
from stepwell.handover.message import Heard, Message, ToTrainer, expect
from stepwell.handover.spawn import Process, end_process, has_died, leave_process, start_process

_START_TRIES: Final = 5
_START_SECONDS, _END_SECONDS = 30.0, 5.0
_SLICE_SECONDS: Final = 0.5
"""How often the listener looks whether the agent is still there, and whether it is still wanted itself."""
_SILENT_SECONDS, _LEAST_SILENT_SECONDS = 120.0, 5.0
"""An agent that answers nothing for so long is taken for stuck; less than the one only while the run ends."""
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.2, 30.0


class AgentClient:
    """One agent for one trainer. Constructing only assigns; `start` or `adopt` makes the process appear."""

    def __init__(self, log: journal.EventLog) -> None:
        self._log = log
        self._on_message: Callable[[Heard], None] = lambda message: None
        self._hello: protocol.Hello | None = None
        self._serving: tuple[protocol.Serve, int] | None = None
        self._served: Channel | None = None
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._arenas: dict[int, tuple[protocol.NewArena, int]] = {}
        self._layouts: dict[int, protocol.NewLayout] = {}
        self._begun: dict[int, protocol.Begin] = {}
        self._voids: dict[tuple[int, int], protocol.NoPart] = {}
        self._closing: protocol.Close | None = None
        self._ended = threading.Event()
        self._hurried = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_started = self._is_greeted = self._is_hurried = self._is_over = False
        self._silent_seconds = _SILENT_SECONDS
        self.offer: tuple[protocol.Offer, list[int]] | None = None
        self._deaths = Deaths()
        self.pid = 0

    def start(self, hello: protocol.Hello, on_message: Callable[[Heard], None] = lambda message: None) -> None:
        """Start an agent, or take over the adopted one. Returns when it answered. Raises AgentError."""
        self._hello, self._on_message = hello, on_message
        with self._lock:
            for tries_left in reversed(range(_START_TRIES)):
                try:
                    if self._channel is None:
                        self._spawn()
                    self._greet()
                    break
                except AgentError as error:
                    self.give_up()
                    if not tries_left:
                        raise
                    run_events.logger.warning("%s; starting another one", error)
        if self.offer is not None:
            for fd in self.offer[1]:
                os.close(fd)
            self.offer = None
        self.is_started = self._is_greeted = True
        self._thread = threading.Thread(target=self._listen, daemon=True, name="stepwell-agent-client")
        self._thread.start()

    def launch(self) -> None:
        """Let an agent start while this process reads, unless one was adopted. `start` greets it, or tries again."""
        if self._channel is None:
            with contextlib.suppress(AgentError):
                self._spawn()

    def serve(self, message: protocol.Serve, fd: int) -> None:
        """Let this agent, and each that follows it, serve other nodes at this socket, of which a copy is kept."""
        self._serving = (message, os.dup(fd))
        if self._channel is not None:
            with contextlib.suppress(OSError):  # `start` finds that out
                self._say_serve(self._channel)

    def _say_serve(self, channel: Channel) -> None:
        """Once to each agent: a socket that is handed over again would be closed under the first server."""
        if self._serving is not None and self._served is not channel:
            channel.send(self._serving[0], [self._serving[1]])
            self._served = channel

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """If this block fails before `start`, nobody will greet the agent that was launched: it ends."""
        try:
            yield
        except BaseException:
            if self._process is not None and not self.is_started:
                self._process.kill()  # it holds nothing yet
                self.give_up()
            raise

    def adopt(self, channel: Channel, offer: protocol.Offer, fds: list[int]) -> None:
        """Use the agent of a dead trainer. Comes before `start`, and a restore that is refused may come in between."""
        self._channel, self.pid = channel, offer.agent
        self.offer = (offer, fds)

    def _spawn(self) -> None:
        self._process, self._channel = start_process()
        self.pid = self._process.pid

    def _greet(self) -> None:
        channel, deadline = self._channel, time.monotonic() + _START_SECONDS
        assert channel is not None and self._hello is not None
        try:
            self._say_serve(channel)
            channel.send(self._hello)
            answer = None
            while not isinstance(answer, protocol.Ready):
                answer = channel.next_buffered()  # an adopted one may still have told of its old trainer's snapshots
                if answer is not None:
                    continue
                if not channel.has_news(deadline - time.monotonic()):
                    raise TimeoutError(f"did not start within {_START_SECONDS:.0f} s")
                if not channel.fill():
                    raise BrokenPipeError
        except OSError as error:
            has_ended = isinstance(error, (BrokenPipeError, ConnectionResetError))
            how = "ended at once; see its error above" if has_ended else f"does not answer: {error}"
            raise AgentError(f"the agent (process {self.pid}) {how}", pid=self.pid) from error

    def give_up(self) -> str:
        """Be rid of an agent that ended or does not answer. Returns how it ended. Raises AgentError if it has not."""
        with self._lock:
            channel, self._channel, self._is_greeted = self._channel, None, False
        if channel is not None:
            channel.close()
        return end_process(self._process, self.pid, _END_SECONDS)

    # -- saying things ------------------------------------------------------------------------------------------------

    def send_arena(self, message: protocol.NewArena, fd: int) -> None:
        """Hand an arena over. A copy of `fd` is kept while this may have to be said again."""
        with self._lock:
            self._arenas[message.generation] = (message, os.dup(fd))
            self._send(message, [fd])
            self._forget_old()

    def send_layout(self, message: protocol.NewLayout) -> None:
        """Describe the leaves once; snapshots refer to it by number."""
        with self._lock:
            self._layouts[message.id] = message
            self._send(message)
            self._forget_old()

    def _forget_old(self) -> None:
        """Keep the newest arena and layout, and those that snapshots on their way refer to."""
        arenas = {message.generation for message in self._begun.values()} | {max(self._arenas, default=0)}
        layouts = {message.layout for message in self._begun.values()}
        for is_partial in (False, True):  # one of whole states, and one of what goes with symbols
            layouts |= {max((n for n, each in self._layouts.items() if each.is_partial is is_partial), default=0)}
        for generation in self._arenas.keys() - arenas:
            os.close(self._arenas.pop(generation)[1])
        for number in self._layouts.keys() - layouts:
            del self._layouts[number]

    def begin(self, message: protocol.Begin) -> None:
        """Announce a snapshot whose bytes are about to arrive in the arena, in the place of what its slot held."""
        place = message.generation, message.slot
        with self._lock:
            for number, begun in list(self._begun.items()):
                if (begun.generation, begun.slot) == place and not begun.written:
                    del self._begun[number]
            self._begun[message.sequence] = message
            self._send(message)

    def note_written(self, message: protocol.Begin) -> None:
        """A streamed part is durable: another agent would have to look after those of the other ranks."""
        with self._lock:
            self._begun[message.sequence] = replace(message, written=True)

    def say_void(self, message: protocol.NoPart) -> None:
        """This rank has no part in a checkpoint. Said again until it is done: the other ranks wait for it."""
        with self._lock:
            self._voids[message.step, message.repeat] = message
            self._send(message)

    def send(self, message: Message) -> None:
        """Say something that is not repeated to a replaced agent."""
        with self._lock:
            self._send(message)

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._channel is None or not self._is_greeted:
            return  # there will be another one, which is told what matters
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            self._kill("no longer reads messages")
        except OSError:
            pass  # the listener sees the death and repeats all that matters

    # -- listening ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._is_over:
            try:
                if not self._go_round():
                    break
            except Exception:  # this thread must live on: without it no slot is ever released
                run_events.logger.exception("an error in the thread that listens to the agent; it continues")
                self._pause(_FIRST_RETRY_SECONDS)
        self._ended.set()

    def _go_round(self) -> bool:
        """The next message, or another agent. False: there is nothing more to hear."""
        channel = self._channel
        message = None if channel is None else self._hear(channel)
        if message is not None:
            return self._note(expect(message, ToTrainer))
        is_done = self._closing is not None and not self._begun and not self._voids
        return not (is_done or self._is_over) and self._replace()

    def _hear(self, channel: Channel) -> Message | None:
        """The next message; None if none will come. Slices are counted: time in which this process is frozen is not."""
        silent, asked = 0.0, False
        with contextlib.suppress(OSError):
            while not self._is_over:
                if (message := channel.next_buffered()) is not None:
                    return message
                if channel.has_news(_SLICE_SECONDS):
                    if not channel.fill():
                        return None
                    silent, asked = 0.0, False
                    continue
                if has_died(self._process, self.pid) and not channel.has_news(0):
                    return None  # a fork of this process may hold its end of the socket
                silent += _SLICE_SECONDS
                if silent >= self._silent_seconds:
                    self._kill(f"has not answered for {silent:.0f} s")
                    return None
                if not asked and silent >= self._silent_seconds / 4:
                    asked = True
                    self.send(protocol.Ping())
        return None

    def _kill(self, why: str) -> None:
        run_events.logger.warning("the agent (process %d) %s; replacing it", self.pid, why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _note(self, message: ToTrainer) -> bool:
        """Remember what another agent would not have to be told, and pass it on. False: this was the last one."""
        match message:
            case protocol.Bye():
                return False
            case protocol.GivesUp(void):  # before it tells the other ranks
                with self._lock:
                    self._voids[void.step, void.repeat] = void
                return True
            case protocol.Voided():
                with self._lock:
                    self._voids.pop((message.step, message.repeat), None)
                return True
            case protocol.Released(sequence, is_over=False):
                with self._lock:  # its slot is filled anew; another agent would only have to look after the others
                    if sequence in self._begun:
                        self.note_written(self._begun[sequence])
            case protocol.Released(sequence, is_over=True) | protocol.WriteFailed(sequence, final=True):
                with self._lock:
                    self._begun.pop(sequence, None)
                    self._forget_old()
            case protocol.Durable():
                self._deaths.note_durable()
        if not isinstance(message, protocol.Pong):
            self._tell(message)
        return True

    def _tell(self, message: Heard) -> None:
        try:
            self._on_message(message)
        except Exception:
            run_events.logger.exception("cannot understand a message of the agent: %s", type(message).__name__)

    def _replace(self) -> bool:
        """The agent died: start another one and tell it everything that is not durable yet. False: the run ends."""
        old, pause = self.pid, self._deaths.note()
        if pause and self._is_hurried:
            self._tell(protocol.Lost())
            return False
        status = self._start_another(AgentsFail(deaths=self._deaths.count, given_up=0, seconds=pause))
        if status is None:
            return False
        with self._lock:
            self._is_greeted = True
            # In the order in which it was said first (all numbers come from one counter): an arena that no snapshot
            # uses is dropped when a newer one arrives.
            said: dict[int, tuple[Message, list[int]]] = {
                number: (message, [fd]) for number, (message, fd) in self._arenas.items()
            }
            said |= {number: (message, []) for number, message in (*self._layouts.items(), *self._begun.items())}
            for number in sorted(said):
                self._send(*said[number])
            for message in self._voids.values():
                self._send(message)
            if self._closing is not None:
                self._send(self._closing)
            resent = len(self._begun)
        self._log.emit(run_events.AgentDeath(pid=old, status=status, resent=resent))
        self._tell(protocol.Replaced(self.pid))
        return True

    def _start_another(self, failing: AgentsFail) -> str | None:
        """How the one before ended; None if the run ended first. Nobody waits for this; what is said is kept."""
        status, retry = None, _FIRST_RETRY_SECONDS
        while not self._is_over:
            try:
                ended = self.give_up()
                status = status or ended
                if failing.seconds:
                    self._give_snapshots_up(failing)
                    self._pause(failing.seconds)
                    failing = replace(failing, seconds=0.0)
                self._spawn()
                self._greet()
                return status
            except AgentError as error:
                run_events.logger.error("%s; retrying in %.1f s", error, retry)
                self._pause(retry)
                retry = min(_LAST_RETRY_SECONDS, 2 * retry)
        return None

    def _pause(self, seconds: float) -> None:
        """The end of the run cuts it short, once."""
        if self._hurried.wait(seconds):
            self._hurried.clear()

    def _give_snapshots_up(self, failing: AgentsFail) -> None:
        """What kills one agent after the other may be one of these. The other ranks are told to wait for none."""
        hello = self._hello
        assert hello is not None
        with self._lock:
            lost = [message for message in self._begun.values() if not message.written]
            for message in lost:
                del self._begun[message.sequence]
                if hello.world_size > 1 and message.request.durable:
                    void = void_of(message, failing.reason())
                    self._voids[void.step, void.repeat] = void
            self._forget_old()
        self._log.emit(replace(failing, given_up=len(lost)))
        for message in lost:
            for word in given_up(message, hello.lineage, failing.reason()):
                self._tell(word)

    # -- the end ------------------------------------------------------------------------------------------------------

    def hurry(self, seconds: float) -> None:
        """The run ends within this time: an agent that answers nothing is replaced sooner."""
        self._silent_seconds = min(self._silent_seconds, max(_LEAST_SILENT_SECONDS, seconds / 3))
        self._is_hurried = True
        self._hurried.set()

    def close(self, *, seconds: float) -> bool:
        """Ask the agent to finish and end; wait for it. False if it did not finish in time: it goes on by itself."""
        if not self.is_started:
            return True  # there never was one, or it was given up
        with self._lock:
            self._closing = protocol.Close(seconds)
            self._send(self._closing)
        self.hurry(seconds)
        finished = self._ended.wait(seconds + _END_SECONDS)
        self._is_over = True
        self._hurried.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS + _SLICE_SECONDS)
            if self._thread.is_alive():
                return False  # it starts an agent right now, and may use all that would be closed here
        if self._process is not None:
            finished = leave_process(self._process, _END_SECONDS if finished else 0.0)
        if self._channel is not None:
            self._channel.close()
        for fd in [fd for _, fd in self._arenas.values()] + ([self._serving[1]] if self._serving is not None else []):
            os.close(fd)
        self._arenas, self._serving = {}, None
        return finished
