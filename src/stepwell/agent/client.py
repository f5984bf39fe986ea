"""The trainer's end of the agent: start it, tell it, listen to it, replace it when it dies.

Owns:    the child process, the socket, one listening thread, and what must be said again to a new agent.
Holds:   no call here waits for the disk; a dead agent is replaced and told of every snapshot that is not durable;
         the agent is started with exec, so it never imports the user's script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stepwell import events, journal
from stepwell.agent.offer import PROTOCOL
from stepwell.arena.channel import Channel, Message, connect, find_agents, is_stopped
from stepwell.errors import AgentError

_BOOT: Final = (
    "import sys; sys.path[:0] = sys.argv[2:]; del sys.argv[2:]; from stepwell.agent.process import main; main()"
)
_MAX_DEATHS_PER_MINUTE: Final = 5
_START_TRIES: Final = 5
_END_SECONDS: Final = 5.0


class AgentClient:
    """One agent for one trainer. Constructing only assigns; `start` or `adopt` makes the process appear."""

    def __init__(self, log: journal.EventLog, on_message: Callable[[Message], None]) -> None:
        self._log = log
        self._on_message = on_message
        self._hello: Message = {}
        self._serving: tuple[Message, int] | None = None
        self._served: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._arenas: dict[int, tuple[Message, int]] = {}
        self._layouts: dict[int, Message] = {}
        self._begun: dict[int, Message] = {}
        self._voids: dict[tuple[int, int], Message] = {}
        self._closing: Message | None = None
        self._ended = threading.Event()
        self._is_started = False
        self.offer: tuple[Message, list[int]] | None = None
        self._deaths: list[float] = []
        self.pid = 0

    def start(self, hello: Message) -> None:
        """Start an agent, or take over the adopted one. Returns when it answered. Raises AgentError."""
        self._hello = hello
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
                    events.logger.warning("%s; starting another one", error)
        if self.offer is not None:
            for fd in self.offer[1]:
                os.close(fd)
            self.offer = None
        self._is_started = True
        threading.Thread(target=self._listen, daemon=True, name="stepwell-agent-client").start()

    def launch(self) -> None:
        """Let an agent start while this process reads, unless one was adopted. `start` greets it, or tries again."""
        if self._channel is None:
            with contextlib.suppress(AgentError):
                self._spawn()

    def serve(self, message: Message, fd: int) -> None:
        """Let this agent, and each that follows it, serve other nodes at this socket, of which a copy is kept."""
        self._serving = ({"type": "serve", **message}, os.dup(fd))
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
            if self._process is not None and not self._is_started:
                self._process.kill()  # it holds nothing yet
                self.give_up()
            raise

    def adopt(self, channel: Channel, offer: Message, fds: list[int]) -> None:
        """Use the agent of a dead trainer. Comes before `start`, and a restore that is refused may come in between."""
        self._channel, self.pid = channel, offer["agent"]
        self.offer = (offer, fds)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-c", _BOOT, str(theirs.fileno()), *_import_path()]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise AgentError(f"the agent process could not be started: {error}", command=command[0]) from error
        finally:
            theirs.close()
        self._channel, self.pid = Channel(ours), self._process.pid

    def _greet(self) -> None:
        assert self._channel is not None
        self._channel.socket.settimeout(30.0)
        try:
            self._say_serve(self._channel)
            self._channel.send(self._hello)
            answer = self._channel.receive()
            while answer is not None and answer[0]["type"] != "ready":
                answer = self._channel.receive()  # an adopted agent may still have told of its old trainer's snapshots
        except OSError as error:
            raise AgentError(f"the agent (process {self.pid}) does not answer: {error}", pid=self.pid) from error
        if answer is None:
            raise AgentError(f"the agent (process {self.pid}) ended at once; its error is above", pid=self.pid)
        self._channel.socket.settimeout(None)

    def give_up(self) -> str:
        """Be rid of an agent that ended or does not answer. Returns how it ended."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is None:
            return "gone"
        try:
            status = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"exit status {status}"

    # -- saying things ------------------------------------------------------------------------------------------------

    def send_arena(self, shape: Message, fd: int) -> None:
        """Hand an arena over. A copy of `fd` is kept while this may have to be said again."""
        message = {"type": "arena", **shape}
        with self._lock:
            self._arenas[shape["generation"]] = (message, os.dup(fd))
            self._send(message, [fd])
            self._forget_old()

    def send_layout(self, layout: Message) -> None:
        """Describe the leaves once; snapshots refer to it by number."""
        message = {"type": "layout", **layout}
        with self._lock:
            self._layouts[layout["id"]] = message
            self._send(message)
            self._forget_old()

    def _forget_old(self) -> None:
        """Keep the newest arena and layout, and those that snapshots on their way refer to."""
        arenas = {message["generation"] for message in self._begun.values()} | {max(self._arenas, default=0)}
        layouts = {message["layout"] for message in self._begun.values()}
        for is_partial in (False, True):  # one of whole states, and one of what goes with symbols
            layouts |= {
                max((n for n, each in self._layouts.items() if each.get("is_partial", False) is is_partial), default=0)
            }
        for generation in self._arenas.keys() - arenas:
            os.close(self._arenas.pop(generation)[1])
        for number in self._layouts.keys() - layouts:
            del self._layouts[number]

    def begin(self, message: Message) -> None:
        """Announce a snapshot whose bytes are about to arrive in the arena, in the place of what its slot held."""
        place = message["generation"], message["slot"]
        with self._lock:
            gone = [
                number
                for number, begun in self._begun.items()
                if (begun["generation"], begun["slot"]) == place and not begun.get("written")
            ]
            for number in gone:
                del self._begun[number]
            self._begun[message["sequence"]] = message
            self._send(message)

    def note_written(self, message: Message) -> None:
        """A streamed part is durable: another agent would have to look after those of the other ranks."""
        with self._lock:
            self._begun[message["sequence"]] = {**message, "written": True}

    def say_void(self, message: Message) -> None:
        """This rank has no part in a checkpoint. Said again until it is done: the other ranks wait for it."""
        with self._lock:
            self._voids[message["step"], message["repeat"]] = message
            self._send(message)

    def send(self, message: Message) -> None:
        """Say something that is not repeated to a replaced agent."""
        with self._lock:
            self._send(message)

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            events.logger.warning("the agent (process %d) does not read any more; it is replaced", self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        except OSError:
            pass  # the listener sees the death and repeats all that matters

    # -- listening ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            channel = self._channel
            received = None
            if channel is not None:
                with contextlib.suppress(OSError):
                    received = channel.receive()
            if received is None:
                is_done = self._closing is not None and not self._begun and not self._voids
                if is_done or not self._replace():
                    self._ended.set()
                    return
                continue
            message = received[0]
            if message["type"] in ("gives_up", "voided"):
                self._note_void(message)
                continue
            sequence: int = message.get("sequence", 0)
            if message["type"] == "released" and not message["is_over"]:
                with self._lock:  # its slot is filled anew; another agent would only have to look after the others
                    if sequence in self._begun:
                        self._begun[sequence] = {**self._begun[sequence], "written": True}
            elif message["type"] == "released" or (message["type"] == "failed" and message["final"]):
                with self._lock:
                    self._begun.pop(sequence, None)
                    self._forget_old()
            elif message["type"] == "bye":
                self._ended.set()
                return
            try:
                self._on_message(message)
            except Exception:  # this thread must live on: without it no slot is ever released
                events.logger.exception("a message of the agent was not understood: %s", message["type"])

    def _note_void(self, message: Message) -> None:
        """The agent is about to tell the other ranks that this one has no part in a checkpoint, or has done so."""
        with self._lock:
            if message["type"] == "gives_up":
                self._voids[message["void"]["step"], message["void"]["repeat"]] = message["void"]
            else:
                self._voids.pop((message["step"], message["repeat"]), None)

    def _replace(self) -> bool:
        """The agent died: start another one and tell it everything that is not durable yet."""
        old, now = self.pid, time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < 60] + [now]
        if len(self._deaths) > _MAX_DEATHS_PER_MINUTE:
            events.logger.error(
                "the agent died %d times within a minute: no more checkpoints are written", len(self._deaths)
            )
            self._on_message({"type": "lost"})
            return False
        with self._lock:
            status = self.give_up()
            try:
                self._spawn()
                self._greet()
            except AgentError as error:
                events.logger.error("%s", error)
                self.give_up()
                time.sleep(0.2 * len(self._deaths))
                return True
            # In the order in which it was said first (all numbers come from one counter): an arena that no snapshot
            # uses is dropped when a newer one arrives.
            said = {number: (message, [fd]) for number, (message, fd) in self._arenas.items()}
            said |= {number: (message, []) for number, message in (*self._layouts.items(), *self._begun.items())}
            for number in sorted(said):
                self._send(*said[number])
            for message in self._voids.values():
                self._send(message)
            if self._closing is not None:
                self._send(self._closing)
            resent = len(self._begun)
        self._log.emit(events.AgentDeath(pid=old, status=status, resent=resent))
        self._on_message({"type": "replaced", "pid": self.pid})
        return True

    def close(self, *, seconds: float) -> bool:
        """Ask the agent to finish and end; wait for it. False if it did not finish in time."""
        if not self._is_started:
            return True  # there never was one, or it was given up
        with self._lock:
            self._closing = {"type": "close", "seconds": seconds}
            self._send(self._closing)
        finished = self._ended.wait(seconds + _END_SECONDS)
        if self._process is not None:
            try:
                self._process.wait(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                finished = False
        if self._channel is not None:
            self._channel.close()
        kept = [fd for _, fd in self._arenas.values()] + ([self._serving[1]] if self._serving is not None else [])
        for fd in kept:
            os.close(fd)
        self._arenas, self._serving = {}, None
        return finished


def _import_path() -> list[str]:
    """Where the isolated interpreter finds stepwell and what it needs, wherever the trainer found it."""
    import xxhash

    # Loaded by now if the run lies in a bucket, or has chains.
    needed = [xxhash, *map(sys.modules.get, ("obstore", "zstandard", "numpy"))]
    files = [Path(module.__file__) for module in needed if module is not None and module.__file__]
    found = [Path(__file__).resolve().parents[2], *(file.resolve().parents[1] for file in files)]
    return list(dict.fromkeys(map(str, found)))


def peek(place: str, rank: int) -> tuple[Message, list[int]] | None:
    """What another rank's agent on this machine holds, without becoming its trainer; None if there is nothing."""
    found = _ask(place, rank, "peek")
    if found is None:
        return None
    found[0].close()
    return found[1], found[2]


def find_orphan(place: str, rank: int) -> tuple[Channel, Message, list[int]] | None:
    """A lingering agent of this run whose trainer is dead, with what it offers; None if there is none."""
    return _ask(place, rank, "adopt")


def _ask(place: str, rank: int, wish: str) -> tuple[Channel, Message, list[int]] | None:
    for address in find_agents(place, rank):
        channel = connect(address, timeout=60.0)
        if channel is None:
            continue
        if is_stopped(channel.socket):
            events.logger.warning("agent not adopted: %s is stopped; this process continues from disk", address[1:])
            channel.close()
            continue
        try:
            channel.send({"type": wish, "protocol": PROTOCOL, "pid": os.getpid()})
            received = channel.receive()
        except OSError:
            received = None
        if received is not None and received[0]["type"] == "offer":
            channel.socket.settimeout(None)
            return channel, received[0], received[1]
        if received is not None and received[0].get("trainer"):
            events.logger.warning("agent not adopted: %s; this process continues from disk", received[0]["reason"])
        channel.close()
    return None
