"""The agent's main loop: listens to the trainer, watches it, lets complete snapshots go, lingers when it dies.

Owns:    the process: its signals, its sockets, its end.
Not:     persisting (worker).
Holds:   the trainer's death is seen through a pidfd (the socket's end comes late when loader workers hold it);
         no disk and no long computation holds this thread, but for streamed saves, whose trainer waits; after a clean
         close or after lingering in vain the process ends and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepwell import faults
from stepwell.agent.callers import Callers
from stepwell.agent.offer import offer_later, why_refused
from stepwell.agent.pending import Layouts, Pending
from stepwell.agent.streaming import Streaming
from stepwell.agent.target.peer_door import PeerDoor
from stepwell.agent.trainer_watch import Watched
from stepwell.agent.worker import Worker
from stepwell.events import journal, run_events
from stepwell.handover import protocol
from stepwell.handover.channel import Channel
from stepwell.handover.memory import Arena, ArenaShape
from stepwell.handover.message import Message, MessageError, ToAgent, expect
from stepwell.storage.format.manifest import Void
from stepwell.storage.store import mirror
from stepwell.storage.store.objects import ObjectFacts
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

_POLL_SECONDS: Final = 0.004
_BEAT_SECONDS: Final = 15.0


class Agent:
    """Everything one agent process knows. `run` returns when the process should end."""

    def __init__(self, channel: Channel) -> None:
        self.channel: Channel | None = channel
        self.worker = Worker()
        self.arenas: dict[int, Arena] = {}
        self.layouts = Layouts()
        self.owner = Owner()
        self.run_id, self.lineage = "", 0
        self.linger_seconds = 60.0
        self.paths = RunPaths(Path())
        self._streaming = Streaming(self.worker, self._send)
        self._callers = Callers()
        self._door = PeerDoor(lambda: self.worker.persister)
        self._selector = selectors.DefaultSelector()
        self.trainer = Watched(self._selector)
        self._lock = self.worker.lock
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = self._is_offering = self._is_greeted = self._is_bereft = False
        self._has_news = threading.Event()
        self._leave_at: float | None = None
        self._do: dict[type[Message], Callable[[Any], None]] = {
            protocol.Hello: self._do_hello,
            protocol.Serve: self._do_serve,
            protocol.NewArena: self._do_arena,
            protocol.NewLayout: self._do_layout,
            protocol.Begin: self._do_begin,
            protocol.NoPart: self._do_void,
            protocol.Ping: self._do_ping,
            protocol.BaseTaken: self._do_taken,
            protocol.MakeRoom: self._do_make_room,
            protocol.Close: self._do_close,
            protocol.StreamBegin: self._do_stream,
            protocol.StreamChunk: self._streaming.write,
            protocol.StreamEnd: self._streaming.end,
        }
        self._teller: threading.Thread | None = None

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until closed, or until nobody came back."""
        assert self.channel is not None
        self._selector.register(self.channel, selectors.EVENT_READ, self._on_trainer)
        self._selector.register(self.worker.wake, selectors.EVENT_READ, self._on_wake)
        self.worker.start()
        threading.Thread(target=self._beat, daemon=True, name="stepwell-beat").start()
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._tend()
        self._tend()  # what became durable after the last look is told, or the trainer would call it lost
        self.worker.persister.close()
        self._door.close()
        if self._teller is not None:
            self._teller.join(1.0)
        mirror.publish(self.paths, {}, is_last=True)
        if self.channel is not None:
            self._send(protocol.Bye())

    def _timeout(self) -> float:
        with self._lock:
            if self.worker.queue.has_incomplete():
                return _POLL_SECONDS
            return 0.05 if self.worker.queue.items or self._leave_at is not None else 1.0

    def _is_over(self) -> bool:
        with self._lock:
            if self._closing and self.worker.is_idle:
                return True
            late = 0.0 if self._leave_at is None else time.monotonic() - self._leave_at
            return late > 0 and not self._is_offering and self.worker.may_leave(late)

    def _tend(self) -> None:
        """After each round: release slots, tell the trainer, wake the worker."""
        worker = self.worker
        with self._lock:
            released = worker.queue.collect(worker.busy)
            for item in released:
                if not item.is_over:
                    worker.give_up(item, "its snapshot is void" if item.is_void else "dropped for a newer one")
            outbox, worker.outbox = worker.outbox, []
            if worker.queue.next_due() is not None or worker.queue.next_delta() is not None:
                self._lock.notify_all()
            for generation in worker.queue.unused(self.arenas, worker.busy):
                self.arenas.pop(generation).close()  # of a layout that nobody needs any more
        for message in outbox:
            self._send(message)
        for item in released:
            self._send(protocol.Released(item.sequence, is_over=True))

    def _beat(self) -> None:
        """Show other machines that this run is alive. A thread of its own: the file system may hang."""
        seen: dict[str, ObjectFacts] = {}
        while True:
            if self.trainer.pid:
                with contextlib.suppress(OSError):
                    os.utime(self.paths.progress, follow_symlinks=False)
            mirror.publish(self.paths, seen)
            self._door.report(self.worker.log)
            self._has_news.wait(_BEAT_SECONDS)
            self._has_news.clear()

    def _send(self, message: Message) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):  # the pidfd tells of a dead trainer; losing a message to it is fine
                self.channel.send(message)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.worker.wake)
        while not self._calls.empty():
            self._calls.get_nowait()()

    # -- messages from the trainer ----------------------------------------------------------------------------------

    def _on_trainer(self) -> None:
        channel = self.channel
        if channel is None:
            return
        alive = channel.fill()
        self._do_all(channel)
        if not alive and self.channel is channel:
            self._selector.unregister(channel)
            if self.trainer.is_there and not self._is_greeted:
                self.trainer.forget()  # a successor went on without this agent: the next one may want it
                channel.close()
                self.channel, self._leave_at = None, time.monotonic() + self.linger_seconds
            elif not self.trainer.is_there or self._closing:
                self._leave_at = time.monotonic()

    def _do_all(self, channel: Channel) -> None:
        """What has arrived. What cannot be understood ends this process: its trainer starts another one."""
        while (message := channel.next_buffered()) is not None:
            self._do[type(expect(message, ToAgent))](message)

    def _do_hello(self, message: protocol.Hello) -> None:
        with self._lock:
            self.run_id, self.lineage = message.run, message.lineage
            self.owner = Owner(message.rank, message.world_size)
            faults.set_rank(self.owner.rank)
            self.linger_seconds, self.worker.storage_seconds = message.linger, message.storage
            self.paths = RunPaths.at(message.root, self.owner.rank).remembering()
            wishes = message.keep, message.patience, message.levels, message.deltas
            self.worker.serve(self.paths, self.owner, self.lineage, *wishes)
            self._leave_at, self._is_greeted = None, True
            if (restored := CheckpointId.parse(message.restored)) is not None:
                self.worker.queue.want(restored)
        if not self._callers.listen(message.agents, self.owner.rank, self._selector, self._on_successors):
            self.linger_seconds = 0.0  # nobody can come
        is_there = self._is_bereft or self.trainer.watch(message.pid, self._on_trainer_death)
        self._has_news.set()
        self._send(protocol.Ready(os.getpid()))
        if not is_there:
            self._on_trainer_death()  # right after it had sent this

    def _do_serve(self, message: protocol.Serve) -> None:
        assert self.channel is not None
        self._door.open(message, *self.channel.take_fds(1))

    def _do_arena(self, message: protocol.NewArena) -> None:
        assert self.channel is not None
        (fd,) = self.channel.take_fds(1)
        shape = ArenaShape(**vars(message))
        if shape.generation in self.arenas:
            os.close(fd)
            return
        self.arenas[shape.generation] = Arena.attach(fd, shape)

    def _do_layout(self, message: protocol.NewLayout) -> None:
        self.layouts.add(message)

    def _pending(self, message: protocol.Begin) -> Pending:
        return Pending(
            run=self.run_id,
            id=CheckpointId(message.request.step, message.request.repeat, self.lineage),
            owner=self.owner,
            arena=self.arenas[message.generation],
            layout=self.layouts[message.layout],
            begin=message,
            written_at=time.monotonic() if message.written else None,
        )

    def _do_begin(self, message: protocol.Begin) -> None:
        with self._lock:
            self.worker.queue.add(self._pending(message))

    def _do_stream(self, message: protocol.StreamBegin) -> None:
        self._streaming.begin(self._pending(message))

    def _do_void(self, message: protocol.NoPart) -> None:
        id = CheckpointId(message.step, message.repeat, self.lineage)
        with self._lock:
            self.worker.say_void(Void(self.run_id, id, self.owner.rank, message.reason))

    def _do_ping(self, message: protocol.Ping) -> None:
        self._send(protocol.Pong())

    def _do_taken(self, message: protocol.BaseTaken) -> None:
        self.worker.note_taken(message.sequence)

    def _do_make_room(self, message: protocol.MakeRoom) -> None:
        self.worker.make_room()

    def _do_close(self, message: protocol.Close) -> None:
        self._closing = True
        self._drop_incomplete()
        with self._lock:
            self.worker.queue.drop_unwanted()
        self.worker.hurry()
        self._leave_at = time.monotonic() + message.seconds

    # -- death and succession -----------------------------------------------------------------------------------------

    def _on_trainer_death(self) -> None:
        """Finish what is complete, then wait for a successor."""
        pid, self._is_bereft = self.trainer.pid, True
        self.trainer.forget()
        if self.channel is not None:
            self._drain(self.channel)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.channel)
            self.channel.close()
            self.channel = None
        self._streaming.drop("its process ended before the snapshot was streamed")
        self._drop_incomplete()
        with self._lock:
            if not self._closing:
                self.worker.queue.want_newest()
            pending = len([item for item in self.worker.queue.items if not item.is_over])
        if not self._closing:
            facts = self.paths.progress, pid, pending
            self._teller = threading.Thread(target=self.worker.tell_death, args=facts, daemon=True)
            self._teller.start()
        self._is_bereft = self._is_greeted = False
        self._has_news.set()
        self._leave_at = time.monotonic() + (0 if self._closing and not pending else self.linger_seconds)
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)  # `train 2>&1 | tee` must not wait for us

    def _drop_incomplete(self) -> None:
        with self._lock:
            for item in self.worker.queue.drop_incomplete():
                self.worker.give_up(item, "its process ended before the snapshot was complete")

    def _drain(self, channel: Channel) -> None:
        """Messages that were sent before the kill are still in the socket."""
        channel.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while channel.fill():
                pass
        self._do_all(channel)

    def _on_successors(self) -> None:
        """Somebody asks for the memory of a dead trainer."""
        for channel in self._callers.take():
            self._answer(channel)

    def _answer(self, channel: Channel) -> None:
        try:
            received = channel.receive()
            if received is None or not isinstance(received[0], protocol.Peek):
                channel.close()
                return
            wish, is_peek = received[0], not isinstance(received[0], protocol.Adopt)
            is_taken = self._closing or (self._is_offering and not is_peek)
            trainer = self.trainer.pid if self._is_greeted or not is_peek else 0
            refusal = why_refused(wish, trainer=trainer, is_closing=is_taken)
            if refusal is not None:
                channel.send(protocol.NoOffer(refusal, self.trainer.pid))
                channel.close()
                return
            self._offer(channel, 0 if is_peek else wish.pid)
        except (OSError, MessageError):  # it is gone, or of another version
            channel.close()

    def _offer(self, channel: Channel, pid: int) -> None:
        """Hand the arena over, once the offer is made. `pid` is 0 for another rank that only reads."""
        with self._lock:
            complete = self.worker.queue.complete()
        self._is_offering = self._is_offering or pid != 0

        def ready(offer: protocol.Offer, fds: list[int]) -> None:
            self._calls.put(lambda: self._hand_over(channel, pid, offer, fds))
            os.eventfd_write(self.worker.wake, 1)

        offer_later(complete, ready, self.worker.wait_symbols)

    def _hand_over(self, channel: Channel, pid: int, offer: protocol.Offer, fds: list[int]) -> None:
        """The successor becomes our trainer when it says hello on this connection."""
        if not pid:
            with contextlib.suppress(OSError):  # it is gone
                channel.send(offer, fds)
            channel.close()
            return
        self._is_offering = False
        self._leave_at = time.monotonic() + self.linger_seconds
        try:
            channel.send(offer, fds)
            if not self.trainer.watch(pid, self._on_trainer_death):
                raise ProcessLookupError(pid)
        except OSError:  # it is gone
            channel.close()
            return
        self._leave_at = None  # it may wait for other ranks for long before it says hello
        self.worker.log.emit(run_events.Adopted(pid=pid, complete=len(fds)))
        channel.socket.settimeout(None)
        self.channel = channel
        self._selector.register(channel, selectors.EVENT_READ, self._on_trainer)


def main() -> None:
    """Entry of the process. The descriptor of the socket is the only argument."""
    faults.set_role("agent")
    journal.speak_to_terminal("stepwell agent", logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when the agent ends
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody opened a file while `store.spare` held a lease on it
    sock = socket.socket(fileno=int(sys.argv[1]))
    Agent(Channel(sock)).run()
    os._exit(0)
