"""No wait without an end: each call that may block has a timeout, or stands on this list with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "stepwell"

NEEDED = {"wait": 1, "result": 1, "exception": 1, "join": 1, "select": 1, "poll": 1, "communicate": 1, "wait_for": 2}
"""Methods that block, and how many arguments they have with a timeout."""
ALWAYS = {"accept", "recv", "recvmsg", "flock", "lockf", "waitpid"}
"""These have none: the socket or the descriptor has to have it."""
KEYWORDS = {"timeout", "timeout_s", "seconds"}

IDLE = "a thread of its own, which ends with the process, waits for work"
COMPUTES = "for threads of this process that only compute or read, and whose errors come out here"
NO_BLOCK = "the socket does not block"
ALLOWED = {
    "agent/target/flush.py::_work": IDLE,
    "agent/target/marker.py::_next": IDLE,
    "agent/files/writer_threads.py::_serve": IDLE,
    "agent/files/writer_threads.py::run": "agent: for threads that write; the trainer replaces an agent that is stuck",
    "agent/callers.py::take": NO_BLOCK,
    "agent/files/writer.py::digest_image": COMPUTES,
    "handover/channel.py::fill": "after `has_news` or with a timeout of the socket; in the agent after a selector",
    "storage/chain/apply_threads.py::_make": COMPUTES,
    "storage/chain/apply_threads.py::__iter__": COMPUTES,
    "storage/chain/apply_on_device.py::move_on": COMPUTES,
    "storage/chain/apply.py::move_on": COMPUTES,
    "storage/chain/apply.py::_wait": COMPUTES,
    "storage/codecs/device/device_coder.py::finish": "a CUDA stream: the calls to its device have no timeout",
    "ranks/line/line_door.py::welcome": NO_BLOCK,
    "ranks/line/line_meeting.py::_receive": "the socket has a timeout since it was connected",
    "ranks/line/line_connection.py::receive": NO_BLOCK,
    "events/journal.py::_drain": IDLE,
    "levels/peers/server.py::_welcome": NO_BLOCK,
    "training/snapshot/host_copy.py::_run": IDLE,
    "training/snapshot/host_copy.py::_help": IDLE,
    "training/snapshot/slots.py::_fault_in": COMPUTES,
    "training/snapshot/snapshotter.py::drain": "`Inflight.wait` has an end of its own",
    "training/snapshot/snapshotter.py::take": "`Inflight.wait` has an end of its own",
    "ranks/wire/greeting.py::_advance": NO_BLOCK,
    "adapters/checkfreq/manager.py::save": "`SaveHandle.wait`: the user asked for it; with a warning each minute",
}


def waits(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Function, line and text of each call that may block for ever."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and may_block(node):
            yield function, node.lineno, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


def may_block(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    name, given = call.func.attr, len(call.args)
    if name in ALWAYS:
        return not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN"))
    if any(keyword.arg in KEYWORDS and not is_none(keyword.value) for keyword in call.keywords):
        return False
    if name == "get" or name == "acquire":  # a queue's and a lock's: those of a dict have arguments
        return not given and not call.keywords
    if name == "poll" and not (isinstance(call.func.value, ast.Name) and call.func.value.id in ("poll", "poller")):
        return False  # that of a process does not block, and one that is made is not yet asked
    return name in NEEDED and (given < NEEDED[name] or is_none(call.args[NEEDED[name] - 1]))


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


BLOCKING = [
    "event.wait()", "event.wait(None)", "event.wait(timeout=None)", "thread.join()", "future.result()", "queue.get()",
    "changed.wait_for(is_over)", "sock.accept()", "selector.select()", "fcntl.flock(fd, fcntl.LOCK_EX)",
    "process.communicate()", "lock.acquire()", "poll.poll()",
]  # fmt: skip
FINE = [
    "event.wait(1)", "thread.join(timeout=2)", "future.result(0)", "queue.get(timeout=1)", "table.get(key)",
    "changed.wait_for(is_over, 1)", "', '.join(names)", "queue.get_nowait()", "fcntl.flock(fd, LOCK_EX | LOCK_NB)",
]  # fmt: skip


@pytest.mark.parametrize("text", BLOCKING)
def test_control_a_wait_without_an_end_is_seen(text: str) -> None:
    assert [line for _, line, _ in waits(ast.parse(text))] == [1]


@pytest.mark.parametrize("text", FINE)
def test_control_a_wait_with_an_end_is_none(text: str) -> None:
    assert not list(waits(ast.parse(text)))


def test_every_wait_has_an_end_or_a_reason() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        for function, line, text in waits(ast.parse(path.read_text())):
            found.setdefault(f"{module}::{function}", []).append(f"{module}:{line}: {text}")
    assert [place for where, places in found.items() if where not in ALLOWED for place in places] == []
    assert ALLOWED.keys() - found.keys() == set(), "the list stays short"
