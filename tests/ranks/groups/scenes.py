"""What each rank of a test does. Asserts here fail the test; a GroupError that gets out is the scene's result."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import GroupError
from stepwell.ranks.groups.detect import find_group
from stepwell.ranks.groups.group import Group
from stepwell.ranks.line.line import Line

KINDS = [None, True, 0, -(2**53), 1.5, float("inf"), "", "text \u00e9 \U0001f600", [1, [2, []]], {"a": {"b": None}}]
KEY = b"k" * 32
VOTE = "the vote on step 40"


def well(group: Group) -> None:
    """Everything that works, in one start of the processes."""
    rank, size, ranks = group.rank, group.size, range(group.size)
    for kind in KINDS:
        assert group.all_gather([rank, kind], "a value") == [[r, kind] for r in ranks]
        assert group.broadcast(kind if rank == 0 else "not looked at", "a value") == kind
    assert group.broadcast(f"from {rank}", "the last one's", root=size - 1) == f"from {size - 1}"
    large = group.all_gather(str(rank) * 5_000_000, "5 MB")
    assert [(text[0], len(text)) for text in large] == [(str(r), 5_000_000) for r in ranks]
    for number in range(200):
        assert group.all_gather(number * size + rank, "a quick round") == [number * size + r for r in ranks]
    if rank == size - 1:
        time.sleep(1.0)
    group.barrier("one is late, but in time", seconds=2.0)
    assert (group.node, group.nodes, group.local_rank, group.local_size) == (0, 1, rank, size)
    group.close()
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.barrier("after the end")


def nodes(group: Group) -> None:
    """Ranks 0 and 2 share a node, so do 1 and 3; and a second group does not disturb the first."""
    os.environ["STEPWELL_NODE"] = "zebra" if group.rank % 2 == 0 else "ant"
    second = find_group(seconds=10)
    assert (second.node, second.nodes, second.local_rank) == (group.rank % 2, 2, group.rank // 2)
    assert second.local_size == len(range(group.rank % 2, group.size, 2))
    assert second.all_gather(group.rank, "in the second") == group.all_gather(group.rank, "in the first")


def mismatch(group: Group) -> None:
    with pytest.raises(GroupError) as first:
        group.barrier("the odd one" if group.rank == 1 else "the others", seconds=20)
    with pytest.raises(GroupError) as second:
        group.barrier("the next", seconds=20)
    assert str(second.value) == str(first.value)
    raise first.value


def _without(victim: int, signal_number: int) -> Callable[[Group], None]:
    def scene(group: Group) -> None:
        Path(f"ready-{group.rank}").touch()
        if group.rank == victim:
            while len(list(Path().glob("ready-*"))) < group.size:
                time.sleep(0.01)  # the others are still opening, and rank 0 has the store they need for it
            os.kill(os.getpid(), signal_number)
        with pytest.raises(GroupError) as first:
            group.all_gather("yes", VOTE, seconds=1.5)
        began = time.monotonic()
        with pytest.raises(GroupError) as second:
            group.all_gather("yes", "the next", seconds=60)
        assert str(second.value) == str(first.value) and time.monotonic() - began < 0.5
        raise first.value

    return scene


class Mortal:
    """A store whose rank is killed before its next request but so many, once all others are there."""

    def __init__(self, store: Any, requests: int, others: Callable[[], bool]) -> None:
        self._store, self._left, self._others = store, requests, others

    def __getattr__(self, name: str) -> Any:
        if not self._left:
            while not self._others():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return getattr(self._store, name)


def _dying(victim: int, requests: int) -> Callable[[Group], None]:
    """It has left its value when it dies, so the round is whole for all; with no request of its own, it is missing."""

    def scene(group: Group) -> None:
        if group.rank == victim % group.size:
            others = [f"ready-{rank}" for rank in range(group.size) if rank != group.rank]
            store = group._store  # type: ignore[attr-defined]
            group._store = Mortal(store, requests, lambda: all(map(os.path.exists, others)))  # type: ignore[attr-defined]
        else:
            Path(f"ready-{group.rank}").touch()
        found = group.all_gather(group.rank, VOTE, seconds=2.0)
        assert found == list(range(group.size))

    return scene


def training(group: Group) -> None:
    """Our calls come in another order than training's collectives on every rank, and neither waits for the other."""
    import torch
    import torch.distributed as dist

    done: list[int] = []

    def agree() -> None:
        for number in range(100):
            group.all_gather(number, "beside training", seconds=20)
            done.append(number)

    other = threading.Thread(target=agree)
    other.start()
    for number in range(300):
        if number % (100 * (group.rank + 1)) == 0:
            time.sleep(0.05)
        value = torch.ones(10)
        dist.all_reduce(value)
        assert value[0] == group.size
    other.join()
    assert len(done) == 100


class Watched:
    """A store that tells when somebody begins to wait in it."""

    def __init__(self, store: Any) -> None:
        self._store, self.is_waiting = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, *arguments: Any) -> None:
        self.is_waiting.set()
        self._store.wait(*arguments)


def store_in_use(group: Group) -> None:
    """Rank 0 waits in a call of ours while training needs the store on all ranks, to make a new group."""
    import torch.distributed as dist

    errors: list[GroupError] = []

    def meet() -> None:
        try:
            group.barrier("beside a new group", seconds=2.0)
        except GroupError as error:
            errors.append(error)

    group.barrier("connected", seconds=20.0)
    early = threading.Thread(target=meet)
    if group.rank == 0:
        watched = group._store = Watched(group._store)  # type: ignore[attr-defined]
        early.start()
        assert watched.is_waiting.wait(20)
        time.sleep(0.2)  # the wait is the next thing it does, but cannot be seen
    dist.new_group()
    if group.rank == 0:
        early.join()
    else:
        meet()
    if errors:
        raise errors[0]


def store_shared(group: Group) -> None:
    """The same, with the connection that training uses."""
    from stepwell.ranks.groups import torch_group

    torch_group._connect = torch_group._get_default_store  # type: ignore[assignment]
    store_in_use(find_group(seconds=10))


def few_keys(group: Group) -> None:
    """What a round left in the store goes when the next ones are over."""
    counts = []
    for number in range(100):
        group.all_gather("x" * (9_000_000 if number == 20 else 10), "a round", seconds=20)
        counts.append(group._store.num_keys())  # type: ignore[attr-defined]
    assert max(counts[50:]) <= counts[5] + 4 * group.size


def line(group: Group) -> None:
    """Both directions in order; the last rank is killed and seen, another one closes and is not reported."""
    heard: list[tuple[int, Any]] = []
    lost: list[int] = []
    changed = threading.Condition()

    def note(target: list[Any], item: object) -> None:
        with changed:
            target.append(item)
            changed.notify_all()

    def until(claim: Callable[[], bool]) -> None:
        with changed:
            assert changed.wait_for(claim, 20), (heard, lost)

    last = group.size - 1
    ours = Line(group, KEY, lambda rank, message: note(heard, (rank, message["n"])), lambda rank: note(lost, rank))
    ours.open(20)
    for number in range(100):
        ours.send({"n": number})
    if group.is_leader:
        until(lambda: len(heard) == 100 * last)
        for rank in range(1, group.size):
            assert [n for sender, n in heard if sender == rank] == list(range(100))
        ours.send({"n": "only you"}, to=last)
        until(lambda: lost == [last])
        ours.send({"n": "over"})
        until(lambda: (1, "goodbye") in heard)
    elif group.rank == last:
        until(lambda: len(heard) == 101)
        assert heard == [(0, n) for n in [*range(100), "only you"]]
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        until(lambda: len(heard) == 101)
        assert heard[-1] == (0, "over")
        ours.send({"n": "goodbye"})
    ours.close()
    assert lost == ([last] if group.is_leader else [])


def line_between_nodes(group: Group) -> None:
    """As if on two machines: rank 0 listens on all its addresses, and is found under one of its names."""
    os.environ["STEPWELL_NODE"] = str(group.rank)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    spread = find_group(seconds=10)
    heard = threading.Event()
    ours = Line(spread, KEY, lambda rank, message: heard.set(), lambda rank: None)
    ours.open(10)
    ours.send({})
    assert heard.wait(10)
    spread.barrier("everybody heard", seconds=10)
    ours.close()


def _line_of_nodes(victim: int) -> Callable[[Group], None]:
    """Two ranks on each node. One is killed; who is behind it, and who goes by way of it, hears of it once."""

    def scene(group: Group) -> None:
        os.environ["STEPWELL_NODE"] = f"node {group.rank // 2}"
        spread = find_group(seconds=10)
        heard: list[Any] = []
        lost: list[int] = []
        changed = threading.Condition()

        def note(target: list[Any], item: object) -> None:
            with changed:
                target.append(item)
                changed.notify_all()

        def until(claim: Callable[[], bool]) -> None:
            with changed:
                assert changed.wait_for(claim, 20), (heard, lost)

        ours = Line(spread, KEY, lambda rank, message: note(heard, (rank, message["n"])), lambda rank: note(lost, rank))
        ours.open(20)
        rank, size, first = group.rank, group.size, group.rank - group.rank % 2
        ours.send({"n": rank})
        until(lambda: len(heard) == (size - 1 if rank == 0 else 1))
        assert sorted(heard) == ([(other, other) for other in range(1, size)] if rank == 0 else [(0, 0)])
        spread.barrier("all heard", seconds=10)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        expected = []
        if rank == 0:
            expected = [victim, victim + 1] if victim % 2 == 0 else [victim]
        elif victim == 0 or (victim == first and rank != victim):
            expected = [victim]
        until(lambda: lost == expected)
        if rank == 0:
            ours.send({"n": "over"})
        elif not expected:  # who closes earlier would let the ranks behind it go in peace
            until(lambda: heard[-1] == (0, "over"))
        ours.close()
        assert lost == expected

    return scene


def line_cannot_connect(group: Group) -> None:
    """The last rank is sent to a port where nobody is."""
    if group.rank == group.size - 1:
        honest = group.all_gather

        def misled(*args: Any, **kwargs: Any) -> Any:
            told = honest(*args, **kwargs)
            return [{**told[0], "port": 1}, *told[1:]] if "port" in told[0] else told

        group.all_gather = misled  # type: ignore[method-assign]
    Line(group, KEY, lambda rank, message: None, lambda rank: None).open(seconds=1.0)


SCENES: dict[str, Callable[[Group], None]] = {
    "well": well,
    "nodes": nodes,
    "mismatch": mismatch,
    "killed last": lambda group: _without(group.size - 1, signal.SIGKILL)(group),
    "killed leader": _without(0, signal.SIGKILL),
    "stopped last": lambda group: _without(group.size - 1, signal.SIGSTOP)(group),
    "stopped leader": _without(0, signal.SIGSTOP),
    **{f"{who} dies after {n}": _dying(victim, n) for who, victim in (("leader", 0), ("last", -1)) for n in range(4)},
    "training": training,
    "store in use": store_in_use,
    "store shared": store_shared,
    "few keys": few_keys,
    "line": line,
    "line between nodes": line_between_nodes,
    **{f"line without {victim}": _line_of_nodes(victim) for victim in (0, 2, 5)},
    "line cannot connect": line_cannot_connect,
}


def play(scene: str, folder: Path) -> bool:
    """Find the group that is set up, play the scene, leave the result in the folder. Whether there was no error."""
    os.chdir(folder)
    result: dict[str, Any] = {"kind": None}
    rank = -1
    began = time.monotonic()
    try:
        group = find_group(seconds=20)
        rank = group.rank
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        result["kind"] = type(group).__name__
        began = time.monotonic()
        SCENES[scene](group)
    except GroupError as error:
        result |= {"error": str(error), **error.fields}
    except BaseException:
        result["failure"] = traceback.format_exc()
    result["seconds"] = time.monotonic() - began
    unfinished = Path(f"unfinished-{os.getpid()}")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(f"result-{rank}")
    return "error" not in result
