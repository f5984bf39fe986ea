"""Another user of the same machine, who is no friend: what he can read, join, hold up, and what he cannot.

Each attack has a control: with what is to stop it left out, it works.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from stepwell.adapters.scr import prefix_index
from stepwell.adapters.scr.prefix_index import Prefix
from stepwell.agent import callers as callers_module
from stepwell.errors import ConfigError, PersistError
from stepwell.events.journal import EventLog
from stepwell.handover import agent_address as address
from stepwell.handover.find_agents import find_orphan
from stepwell.handover.protocol import Durable
from stepwell.levels.level_spec import Levels, Shared
from stepwell.levels.level_spec import Node as Cached
from stepwell.levels.peers.fetch import Peer
from stepwell.ranks.line.line_meeting import LineAddress, call
from stepwell.ranks.wire.secret import derive
from stepwell.restore.from_nodes import Caches
from stepwell.storage.store.lineage import open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.run_secret import make_shared, read_shared
from stepwell.tools.cli.liveness import look_for_life
from tests.agent.puppet import Puppet, here, make_orphan, wait_for
from tests.hostile.stranger import STRANGER, as_stranger, living_stranger, needs_root
from tests.levels.field import Serving
from tests.levels.peer_node import CHECKPOINT, RUN, SECONDS, read
from tests.ranks.groups.circle import Circle
from tests.ranks.groups.ends import KEY, Caller, End
from tests.ranks.groups.test_meet import check_that_rank_1_can_still_join

pytestmark = needs_root


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_dir(tmp_path: Path) -> Path:
    """A run directory that all users can look into."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    place = tmp_path / "run"
    place.mkdir(mode=0o755)
    return place


# The secret of the run


def test_the_secret_is_in_a_file_that_he_cannot_read(open_dir: Path) -> None:
    paths = RunPaths(open_dir)
    make_shared(paths)

    def steal() -> str:
        return (open_dir / "secret").read_text()

    assert as_stranger(lambda: os.listdir(open_dir)) == ["secret"]
    assert as_stranger(steal) == "PermissionError"
    os.chmod(open_dir / "secret", 0o644)  # the control: so he could, and so nobody of the run uses it
    assert bytes.fromhex(as_stranger(steal).strip()) == bytes.fromhex((open_dir / "secret").read_text().strip())
    with pytest.raises(ConfigError, match="mode 0644"):
        read_shared(paths)


def test_a_secret_that_he_put_there_is_not_used(open_dir: Path) -> None:
    os.chmod(open_dir, 0o777)
    paths = RunPaths(open_dir)

    def plant() -> None:
        fd = os.open(open_dir / "secret", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, b"ab" * 32)

    as_stranger(plant)
    make_shared(paths)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        read_shared(paths)
    os.chown(open_dir / "secret", os.getuid(), -1)  # the control: it is the owner that tells
    assert read_shared(paths) == bytes.fromhex("ab" * 32)


# What travels by torch's store, MPI or Horovod, he reads


def overheard(caller: Caller, key: bytes, *, is_sent: bool) -> list[Any]:
    """What two ranks that open a line say over the group, which anybody may hear. `is_sent`: the key too."""
    slots = caller.leader.group._circle.slots  # type: ignore[attr-defined]
    return [*words(slots), *([key.hex()] if is_sent else [])]


def words(slots: Iterable[bytes | str | None]) -> list[Any]:
    """What the ranks have left for each other: a line for the call, and one for the value."""
    return [json.loads(line) for slot in slots if slot for line in slot.splitlines()]


def guesses(said: list[Any]) -> list[bytes]:
    """Every number in it that could be a secret, and what follows from it."""
    found = [bytes.fromhex(text) for text in re.findall(r"[0-9a-f]{32,64}", json.dumps(said)) if len(text) % 2 == 0]
    return [
        guess for each in [bytes(32), *found] for guess in (each, derive(each, "line"), derive(each, "levels", RUN))
    ]


@pytest.mark.parametrize("is_sent", [False, True], ids=["now", "control: the secret in the store"])
def test_he_joins_the_line_as_a_rank(stack: ExitStack, is_sent: bool) -> None:
    caller = Caller(stack)
    said, place = overheard(caller, KEY, is_sent=is_sent), caller.place

    def join() -> int:
        count = 0
        for guess in guesses(said):
            try:
                call(place, guess, 1, time.monotonic() + 0.1)[0].close()
                count += 1
            except OSError:
                pass
        return count

    assert (as_stranger(join) > 0) is is_sent
    if not is_sent:
        caller.connect()
    caller.join()  # or rank 0 would wait for it


class Heard(Circle):
    """A group of two whose every word can be read, as in a store that anybody reaches."""

    def __init__(self) -> None:
        super().__init__(2)
        self.said: list[Any] = []
        wait = self.barrier.wait

        def listen(seconds: float | None = None) -> int:
            self.said.extend(words(self.slots))
            return wait(seconds)

        self.barrier.wait = listen  # type: ignore[method-assign]


def meet(stack: ExitStack, cache: Path, circle: Circle) -> list[Caches]:
    """Two ranks of one node learn where the other one serves."""
    log = EventLog(Path(os.devnull), who="trainer")
    levels = Levels(Cached(cache, address="127.0.0.1"), Shared())
    ranks = [Caches(levels, RUN, RunPaths(cache), circle.rank(rank), log, KEY) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: rank.meet(Serving(stack)), ranks))  # type: ignore[arg-type]
    for rank in ranks:
        stack.callback(rank.close)
    return ranks


@pytest.mark.parametrize("is_sent", [False, True], ids=["now", "control: the secret in the store"])
def test_he_reads_a_shard_from_a_cache_that_is_closed_to_him(stack: ExitStack, tmp_path: Path, is_sent: bool) -> None:
    cache, circle = tmp_path / "cache", Heard()
    cache.mkdir(mode=0o700)
    (rank, _) = meet(stack, cache, circle)
    file = cache / "runs" / RUN / CHECKPOINT / "file"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    said = [*circle.said, *([rank._secret] if is_sent else [])]
    address = rank._seats[0].address

    def steal() -> list[str]:
        stolen = []
        for guess in guesses(said):
            try:
                with closing(Peer(address, guess.ljust(32, b"\0").hex(), RUN, 1.0)) as peer:
                    stolen.append(read(peer, "file", 0, 7).decode())
            except OSError:
                pass
        return stolen

    assert as_stranger(file.read_text) == "PermissionError"
    assert as_stranger(steal) == (["weights"] if is_sent else [])


def test_nothing_secret_is_said_over_the_group(stack: ExitStack, tmp_path: Path) -> None:
    """Whatever the ranks tell each other: neither the key nor anything made from it."""
    circle = Heard()
    ends = [End(circle, rank) for rank in range(2)]
    for end in ends:
        stack.callback(end.line.close)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.line.open(SECONDS), ends))
    ranks = meet(stack, tmp_path / "cache", circle)
    said = json.dumps(circle.said)
    assert "127.0.0.1" in said and str(ranks[0]._seats[1].port) in said  # the control: it was heard
    for secret in (KEY.hex(), derive(KEY, "line").hex(), ranks[0]._secret):
        assert secret not in said


# The line


CROWD = 200


def crowd_of(place: LineAddress) -> tuple[int, list[socket.socket]]:
    socks = [socket.create_connection((place.addresses[0], place.port), timeout=SECONDS) for _ in range(CROWD)]
    return len(socks), socks


def guests_of(caller: Caller) -> Collection[object]:
    """Who has called rank 0 and proved nothing yet."""
    door = caller.leader.line._hub._door
    assert door is not None
    return door._guests


def test_connections_that_say_nothing_keep_no_rank_out(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.line.line_meeting._TRY_SECONDS", 600.0)  # it is not their time that saves us
    caller = Caller(stack)
    with living_stranger(lambda: crowd_of(caller.place)) as count:
        assert count == CROWD
        wait_for(lambda: len(guests_of(caller)) == 16, "the oldest are sent away")
        check_that_rank_1_can_still_join(caller)


def test_control_without_a_limit_they_all_stay(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.line.line_meeting._TRY_SECONDS", 600.0)
    monkeypatch.setattr("stepwell.ranks.line.line_door._LEAST_GUESTS", 10 * CROWD)
    caller = Caller(stack)
    with living_stranger(lambda: crowd_of(caller.place)):
        wait_for(lambda: len(guests_of(caller)) == CROWD, "nobody is sent away")
        check_that_rank_1_can_still_join(caller)


# Agents


def take(names: list[str]) -> tuple[int, list[socket.socket]]:
    """Listen under these names."""
    taken = []
    for name in names:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{name}")
            sock.listen(0)
        except OSError:
            sock.close()
            continue
        taken.append(sock)
    return len(taken), taken


def test_he_takes_the_names_of_agents_that_are_to_come(run_dir: Path) -> None:
    """He knows run, rank and directory, has seen the names of agents before, and takes all numbers that may come."""
    paths = RunPaths(run_dir)
    run = open_run(paths, seed=1).id
    head, _, _ = name_of_a_dead_agent(run_dir).rpartition("/")
    pids = range(os.getpid(), os.getpid() + 400)
    names = [f"stepwell/{run}.{paths.identity}/0/{pid}" for pid in pids] + [f"{head}/{pid}" for pid in pids]
    with living_stranger(lambda: take(names)) as count:
        assert count > 700
        puppet = Puppet(run_dir)
        puppet.start()
        assert [found.pid for found in address.find_agents(here(run_dir), 0)] == [puppet.client.pid]
        assert isinstance(puppet.save(1), Durable)
        assert puppet.close()


def test_control_a_name_that_can_be_guessed_is_taken(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_tag", lambda where, claim: "0" * 32)
    open_run(RunPaths(run_dir), seed=1)
    with address.listen(here(run_dir), 0):
        (seen,) = address.find_agents(here(run_dir), 0)
    with living_stranger(lambda: take([seen.name])) as count, pytest.raises(OSError, match="in use"):
        assert count == 1
        address.listen(here(run_dir), 0)


def name_of_a_dead_agent(run_dir: Path) -> str:
    puppet = Puppet(run_dir)
    puppet.start()
    (seen,) = address.find_agents(here(run_dir), 0)
    assert look_for_life(puppet.paths).agent_pids == (puppet.client.pid,)
    assert puppet.close()
    return seen.name


def fill(name: str) -> tuple[int, list[socket.socket]]:
    """Listen under a name and answer nobody: its queue is full."""
    count, kept = take([name])
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inside.connect(f"\0{name}")
    return count, [*kept, inside]


def test_he_plays_the_agent_of_a_dead_run(run_dir: Path) -> None:
    name = name_of_a_dead_agent(run_dir)
    with living_stranger(lambda: fill(name)) as count:
        assert count == 1
        assert look_for_life(RunPaths(run_dir)).agent_pids == ()
        assert find_orphan(here(run_dir), 0) is None


def test_control_without_a_look_at_the_process_it_seems_to_live(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_of_a_dead_agent(run_dir)
    monkeypatch.setattr(address.FoundSocket, "may_live", True)
    monkeypatch.setattr(address, "_LOOK_SECONDS", 1.0)
    with living_stranger(lambda: fill(name)):
        assert len(look_for_life(RunPaths(run_dir)).agent_pids) == 1


def test_he_floods_an_agent_that_holds_memory(run_dir: Path) -> None:
    agent = make_orphan(run_dir, linger=60)
    (seen,) = address.find_agents(here(run_dir), 0)

    def flood() -> tuple[int, list[socket.socket]]:
        socks = []
        for _ in range(900):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(0)
            try:
                sock.connect(seen.address)
            except BlockingIOError:
                break
            socks.append(sock)
        return len(socks), socks

    with living_stranger(flood) as count:
        assert count > 0
        assert look_for_life(RunPaths(run_dir)).agent_pids == (agent,)
        found = find_orphan(here(run_dir), 0)
        assert found is not None and found[1].agent == agent
    puppet = Puppet(run_dir)
    puppet.client.adopt(*found)
    puppet.start(parent=1, step=1)
    assert puppet.close()


def test_control_a_caller_that_does_not_wait_takes_a_full_queue_for_gone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_BACKLOG", 4)
    open_run(RunPaths(run_dir), seed=1)
    with address.listen(here(run_dir), 0), ExitStack() as stack:
        (seen,) = address.find_agents(here(run_dir), 0)

        def crowd() -> tuple[int, list[socket.socket]]:
            socks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
            for sock in socks:
                sock.connect(seen.address)
            return len(socks), socks

        stack.enter_context(living_stranger(crowd))
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(5.0)  # as it was
        with pytest.raises(BlockingIOError):
            sock.connect(seen.address)


@pytest.mark.parametrize("is_asked", [True, False], ids=["now", "control: nobody asks who calls"])
def test_he_asks_an_agent_for_its_memory(run_dir: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    """He is sent away unheard, and all of his calls in one round, with somebody of our own behind them."""
    open_run(RunPaths(run_dir), seed=1)
    if not is_asked:
        monkeypatch.setattr(callers_module, "is_same_user", lambda sock: True)
    agent = callers_module.Callers()
    with selectors.DefaultSelector() as selector:
        assert agent.listen(here(run_dir), 0, selector, lambda: None)
        (seen,) = address.find_agents(here(run_dir), 0)

        def call_often() -> tuple[int, list[socket.socket]]:
            socks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]
            for sock in socks:
                sock.connect(seen.address)
            return len(socks), socks

        with living_stranger(call_often) as count:
            ours = address.connect(seen, timeout=5)
            assert ours is not None
            heard = list(agent.take())
            assert len(heard) == (1 if is_asked else 1 + count)
            ours.close()
            for channel in heard:
                channel.close()
        assert agent._listener is not None
        agent._listener.close()


# SCR's prefix


def hold(path: Path) -> tuple[int, int]:
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return 1, fd


@pytest.mark.parametrize("is_open", [False, True], ids=["now", "control: a lock that all can read"])
def test_he_holds_the_lock_of_a_prefix(open_dir: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    monkeypatch.setattr(prefix_index, "_LOCK_SECONDS", 0.2)
    prefix = Prefix(open_dir)
    prefix.folder.mkdir(mode=0o755)
    prefix.count_checkpoint()
    if is_open:
        os.chmod(prefix.folder / "lock", 0o644)
    with living_stranger(lambda: hold(prefix.folder / "lock")) as said:
        if is_open:
            assert said == 1
            with pytest.raises(PersistError, match="another process has held"):
                prefix.count_checkpoint()
        else:
            assert said == "PermissionError"
            prefix.count_checkpoint()
