"""Every way a loop can end or save, on every kind of loop: the restart ends with the uninterrupted loop's state.

A cell is one combination. `runs_its_tail_again` names the cells that differ from the uninterrupted loop; a sentence at
the terminal announces it there. No other cell may differ.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import Server, start_script
from tests.ranks.conftest import soak

LOOPER = Path(__file__).parent / "looper.py"
KINDS = ("plain", "accumulation", "scheduler", "validation", "early stop")
EVENTS = ("policy", "save", "sigterm", "break", "exit", "end", "exception", "kill")
STATUS = {"sigterm": 75, "exception": 1, "exit": 3, **dict.fromkeys(("policy", "save", "kill"), -signal.SIGKILL)}
POLICY = {"policy": "epochs", "kill": "steps", "exception": "steps"}
AT = {"policy": 9}
"""The batch (from 1) after which it happens in the body: in the middle of an accumulation, and of the first epoch."""
ANNOUNCED = "from a loader that stepwell does not read"


def runs_its_tail_again(event: str, kind: str, source: str, place: str) -> bool:
    """With a loader of its own an orderly end after the inner loop is taken for one in its body (docs/loops.md)."""
    return event in ("break", "exit") and kind in ("scheduler", "validation") and (source, place) == ("own", "tail")


class Cell:
    """One process after the other on one run."""

    def __init__(self, server: Server, where: Path) -> None:
        self._server, self._where = server, where
        self._starts = 0

    def run(self, **wishes: Any) -> tuple[int, str, dict[str, Any] | None]:
        """Status, what came on the terminal, and the final state if the loop came to its end."""
        self._starts += 1
        log = self._where / f"log-{self._starts}"
        words = self._where / "run", json.dumps({"with": False, **wishes})
        trainer = start_script(self._server, LOOPER, *words, log=log, STEPWELL_LINGER="0")
        status = trainer.wait()
        text = log.read_text()
        finals = [line for line in text.splitlines() if line.startswith("final")]
        return status, text, json.loads(finals[-1].removeprefix("final ")) if finals else None


@pytest.fixture(scope="module")
def straight(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the uninterrupted loops end with."""
    found = {}
    for kind, source in itertools.product(KINDS, ("data", "own")):
        status, text, final = Cell(server, tmp_path_factory.mktemp("straight")).run(kind=kind, source=source)
        assert status == 0 and final is not None, text
        found[kind, source] = final
    return found


def cells() -> Iterator[Any]:
    for number, (event, kind, source, with_, place) in enumerate(
        itertools.product(EVENTS, KINDS, ("data", "own"), (True, False), ("body", "tail"))
    ):
        if place == "tail" and (event == "end" or kind == "early stop"):
            continue  # it has no place in the loop; the loop is over before
        yield soak(event, kind, source, with_, place) if number % 3 else (event, kind, source, with_, place)


@pytest.mark.parametrize(("event", "kind", "source", "with_", "place"), list(cells()))
def test_the_restart_ends_like_the_uninterrupted_loop(
    event: str,
    kind: str,
    source: str,
    with_: bool,
    place: str,
    server: Server,
    straight: dict[tuple[str, str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    cell = Cell(server, tmp_path)
    loop = {"kind": kind, "source": source, "with": with_, "policy": POLICY.get(event, "never")}
    happens = {"epochs": 2} if event == "end" else {"event": event, "place": place, "at": AT.get(event, 5)}
    status, text, _ = cell.run(**loop, **happens)
    assert status == STATUS.get(event, 0), text
    if event == "exception":
        assert "Training ended at step" in text and "a restart redoes" in text
    status, text, final = cell.run(**loop)
    assert status == 0, text
    if runs_its_tail_again(event, kind, source, place):
        assert ANNOUNCED in text and "the code after the inner loop runs again" in text
        assert final is not None and final["seen"] == straight[kind, source]["seen"]
    else:
        assert final == straight[kind, source], text
