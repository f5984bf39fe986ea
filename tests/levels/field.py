"""Nodes in this process: caches in real directories, filled by the real modules, and restarts that read them.

A restart is what `reopen` does without tensors: every rank is a thread with its own `Caches`, serves its node's cache
at a socket, and reads every byte it is asked to; a candidate counts if all ranks have it.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from stepwell.agent.files.writer import Writer
from stepwell.agent.target.node_target import NodeTarget
from stepwell.agent.target.spill import Spill
from stepwell.errors import DamagedError
from stepwell.events import journal
from stepwell.handover.protocol import Serve
from stepwell.levels import level_verdict
from stepwell.levels.assignments import Orders, Seat, run_cache
from stepwell.levels.cached import Level
from stepwell.levels.level_spec import Levels, Node, Pairs, Partner, Protection, Shared, Single
from stepwell.levels.peers.server import PeerServer, listen
from stepwell.levels.protect import sets
from stepwell.levels.protect.copies import keep_shard
from stepwell.ranks.groups.consent import vote
from stepwell.ranks.wire.secret import draw_secret
from stepwell.restore.from_nodes import Caches
from stepwell.restore.verified_read import read_file
from stepwell.storage.format.checksum import BlockHasher
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner
from tests.levels import theory
from tests.ranks.groups.circle import Circle
from tests.requests import request

RUN = "0123456789abcdef"
OLD, NEW = CheckpointId(6, 0, 1), CheckpointId(9, 0, 1)
PAGE = 4096
Content = dict[str, bytes]


def contents(rank: int, id: CheckpointId, draw: random.Random) -> Content:
    """The files of a rank: of uneven sizes, an empty one among them; one rank has none at all."""
    if rank == 3:
        return {}
    sizes = {"safetensors": draw.randrange(1, 5 * PAGE), "frozen.safetensors": draw.choice([0, PAGE, 777])}
    sizes |= {"file.notes": draw.randrange(1, 2 * PAGE)} if rank % 2 else {}
    return {f"{Owner(rank).stem}.{name}": draw.randbytes(size) for name, size in sizes.items()}


def make_record(id: CheckpointId, owner: Owner, content: Content, copies: Mapping[str, str] | None = None) -> Record:
    """Files without tensors: what lies in them does not matter here."""
    entries = []
    for name, data in content.items():
        hasher = BlockHasher(PAGE)
        hasher.update(memoryview(data))
        entries.append(FileEntry(name, "opaque", len(data), PAGE, hasher.finish()))
    return Record(RUN, id, owner, 1.0, tuple(entries), (), {}, copies=dict(copies or {}))


class Field:
    """A run on nodes, `domains` naming each rank's; its two checkpoints are held and protected."""

    def __init__(self, folder: Path, domains: Sequence[str], protect: Protection, seed: int = 1) -> None:
        self.folder, self.domains, self.protect = folder, list(domains), protect
        draw, world = random.Random(seed), range(len(domains))
        self.contents = {id: {rank: contents(rank, id, draw) for rank in world} for id in (OLD, NEW)}

    def place(self, node: str) -> Path:
        return self.folder / f"node.{node}"

    def cache(self, node: str) -> Path:
        root = run_cache(self.place(node), RUN).root
        assert isinstance(root, Path)
        return root

    def build(self, copies: Callable[[int], Mapping[str, str]] = lambda rank: {}) -> None:
        """Let every rank write its part, and do its duties."""
        with ExitStack() as stack:
            keepers = self._serve(stack)
            for keeper in keepers:
                for id, held in self.contents.items():
                    content = held[keeper.owner.rank]
                    record = make_record(id, keeper.owner, content, copies(keeper.owner.rank))
                    keep_shard(keeper.paths, record, record.dump(), from_memory(content))
            for keeper in keepers:
                for id in self.contents:
                    done = keeper.redundancy.duties.do(keeper.paths, id, RUN, keeper.peers)
                    assert done is not None and keeper.redundancy.duties.is_done(keeper.paths, id)

    def decide(self, id: CheckpointId) -> None:
        """As rank 0 does when it is whole: to be carried on."""
        with ExitStack() as stack:
            keepers = self._serve(stack)
            states = {keeper.owner.rank: keeper.answers.state(id) for keeper in keepers}
            manifest = level_verdict.make_manifest(RUN, id, request(id.step), states)
            for keeper in keepers:
                keeper.decisions.keep(id, manifest.dump(), Level(flush=True).dump())

    def rehold(self, id: CheckpointId) -> None:
        """As agents do after a restart: hold and protect it again, whoever sits where now."""
        with ExitStack() as stack:
            keepers = self._serve(stack)
            for _ in range(2):  # the second time nobody waits for another one's part any more
                done = [keeper.rehold(id) for keeper in keepers]
            assert all(done) and not any(keeper.redundancy.why_failed(id) for keeper in keepers)

    def _serve(self, stack: ExitStack) -> list[NodeTarget]:
        """The keepers of all ranks, each asked at a socket of its own."""
        keepers: list[NodeTarget] = []
        sockets = [listen(("127.0.0.1", 0)) for _ in self.domains]
        seats = [Seat(node, node, *sock.getsockname()[:2]) for node, sock in zip(self.domains, sockets, strict=True)]
        secret = draw_secret()
        for rank, node in enumerate(self.domains):
            self.cache(node).mkdir(parents=True, exist_ok=True)
            orders = Orders(str(self.place(node)), RUN, 2, self.protect, Shared(), secret, tuple(seats))
            log = journal.EventLog(Path(os.devnull), who="agent")
            owner = Owner(rank, len(seats))
            spill = Spill(RunPaths(self.folder / "run"), owner, Keep(), log, lineage=1, patience=5.0)
            keepers.append(NodeTarget(orders, owner, log, Writer(), spill, lineage=1, patience=5.0))
            stack.callback(keepers[rank].close)
            server = PeerServer(self.cache(node), secret, RUN, keepers[rank].answer, bind=sockets[rank])
            server.start()
            stack.callback(server.close)
        return keepers

    def copy(self, folder: Path) -> Field:
        """The same, to be spoiled."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        made = Field(folder, self.domains, self.protect)
        made.contents = self.contents
        return made

    def lose(self, nodes: Collection[str]) -> None:
        for node in nodes:
            shutil.rmtree(self.place(node))

    def is_recoverable(self, nodes: Collection[str]) -> bool:
        """What theory says of the loss of these nodes."""
        lost = [rank for rank, node in enumerate(self.domains) if node in nodes]
        if isinstance(self.protect, Single):
            return not lost
        if isinstance(self.protect, Pairs | Partner):
            find = sets.pairs if isinstance(self.protect, Pairs) else sets.ring
            return theory.is_recoverable_from_copies(find(self.domains), lost)
        found, _ = sets.make_sets(self.domains, self.protect.n)
        return theory.is_recoverable_from_parity(found, getattr(self.protect, "m", 1), lost)

    def restart(self, nodes: Sequence[str], wanted: Callable[[int, int], bool] = lambda rank, part: True) -> Restart:
        """All ranks, on these nodes. `wanted`: whether a rank reads a part."""
        return Restart(self, nodes, wanted)

    def check(self, restart: Restart, id: CheckpointId | None) -> None:
        """All ranks read that checkpoint, and every byte is right."""
        assert restart.id == id, f"{restart.id} instead of {id}: {restart.trouble}"
        for rank, found in enumerate(restart.read):
            for part, content in found.items():
                assert id is not None
                assert content == self.contents[id][part], f"rank {rank} read other bytes of part {part}"


def from_memory(content: Content) -> Callable[[FileEntry, int, memoryview], None]:
    def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
        buffer[:] = content[file.name][start : start + len(buffer)]

    return fill


class Restart:
    """What the ranks found. `id`: what all of them read; None if there is nothing to read, or nothing is right."""

    def __init__(self, field: Field, nodes: Sequence[str], wanted: Callable[[int, int], bool]) -> None:
        self._field, self._nodes, self._wanted = field, nodes, wanted
        self.ids: list[CheckpointId | None] = [None] * len(nodes)
        self.read: list[dict[int, Content]] = [{} for _ in nodes]
        self.trouble: list[str] = []
        self.tried: list[CheckpointId] = []
        self.errors: list[BaseException] = []
        circle, self._done = Circle(len(nodes)), threading.Barrier(len(nodes))
        threads = [threading.Thread(target=self._work, args=(circle, rank)) for rank in range(len(nodes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert len(set(self.ids)) == 1, self.ids
        self.id = self.ids[0]

    def _work(self, circle: Circle, rank: int) -> None:
        try:
            with ExitStack() as stack:
                place = self._field.place(self._nodes[rank])
                node = Node(place, protect=self._field.protect, address="127.0.0.1")
                log = journal.EventLog(Path(os.devnull), who="trainer")
                shared = RunPaths(self._field.folder / "run")
                found = Caches(Levels(node, Shared()), RUN, shared, circle.rank(rank), log, b"k" * 32)
                caches = stack.enter_context(closing(found))
                self._try_all(caches, stack, rank)
                self._done.wait(60)  # nobody stops serving while another one reads
        except BaseException as error:
            self.errors.append(error)
            circle.barrier.abort()
            self._done.abort()

    def _try_all(self, caches: Caches, stack: ExitStack, rank: int) -> None:
        caches.meet(Serving(stack))  # type: ignore[arg-type]
        caches.share()
        for id in sorted(caches.whole(_AllLive()), reverse=True):  # type: ignore[arg-type]
            for _ in range(caches.attempts(id)):
                caches.complete(id)
                error = None
                try:
                    self.read[rank] = self._read(caches, id, rank)
                except DamagedError as raised:
                    error = raised
                    caches.doubt(raised)
                bad = vote(caches._group, "the vote", error)
                if bad is None:
                    self.ids[rank] = id
                    caches.orders(_AllLive(), id)  # type: ignore[arg-type]
                    return
                if rank == 0:
                    self.trouble.append(f"{id}: {bad}")
                    self.tried.append(id)
        self.read[rank] = {}

    def _read(self, caches: Caches, id: CheckpointId, rank: int) -> dict[int, Content]:
        found: dict[int, Content] = {}
        for part in caches.parts(id):
            if self._wanted(rank, part.record.owner.rank):
                found[part.record.owner.rank] = {file.name: _bytes(part, file) for file in part.record.files}
        return found


def _bytes(part: Any, file: FileEntry) -> bytes:
    """A file of a part, as restore reads it."""
    with closing(part.open_source(file)) as source:
        read_file(source, file, [], lambda *_: None, check_all=True)
        data = bytearray(-(-max(1, file.nbytes) // PAGE) * PAGE)
        return bytes(source.read(0, file.nbytes, memoryview(data))) if file.nbytes else b""


class Serving:
    """In the place of an agent: serves the cache at the socket."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, facts: Serve, fd: int) -> None:
        sock = socket.socket(fileno=os.dup(fd))
        server = PeerServer(Path(facts.root), facts.secret, facts.run, lambda *_: {}, bind=sock)
        server.start()
        self._stack.callback(server.close)


class _AllLive:
    def is_live(self, id: CheckpointId) -> bool:
        return True
