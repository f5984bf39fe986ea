"""The process that is attacked: restores every forged run, runs the commands that read it, and says what came of it.

Memory is capped (RLIMIT_AS) at what the process has plus a margin, so that an allocation for a forged length fails
loudly; every file that Python opens is noted, so that one outside the run shows. Then some attacks again, each with the
safety off that it is meant for.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stepwell.errors import StepwellError
from stepwell.restore import verified_read
from stepwell.storage.format import manifest, tree
from stepwell.storage.store import files
from stepwell.tools.cli import main as cli
from stepwell.training.state import flatten
from tests.hostile.attacks import ATTACKS
from tests.hostile.forge import Forgery, net, values
from tests.restore.build import damage_events, restore
from tests.training.state.same import difference

MARGIN_BYTES = 512 << 20
COMMANDS = ("ls", "show", "why", "verify")
opened: list[str] = []


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.remove", "os.rename", "os.mkdir", "os.link", "os.truncate", "import"):
        opened.extend(str(argument) for argument in arguments[:2])


def size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def canary(forgery: Forgery) -> dict[str, tuple[str, float]]:
    return {
        str(path.relative_to(forgery.canary)): (path.read_bytes().hex() if path.is_file() else "", path.stat().st_mtime)
        for path in sorted(forgery.canary.rglob("*"))
    }


def attack(name: str, root: Path, commands: Sequence[str] = COMMANDS) -> dict[str, Any]:
    """Forge, restore with little memory to spare, and report."""
    root.mkdir(parents=True)
    forgery = Forgery(root / "run")
    ATTACKS[name].make(forgery)
    before, modules = canary(forgery), set(sys.modules)
    opened.clear()
    found: dict[str, Any] = {"name": name, "error": None, "step": None}
    model, state = net(0), {}  # type: ignore[var-annotated]
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes() + MARGIN_BYTES, resource.RLIM_INFINITY))
    try:
        reopened = restore(forgery.root, {"values": state, "model": model})
        found["step"] = reopened.restored.step if reopened.restored else 0
    except StepwellError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    except BaseException as error:  # anything else is a way in: the test says so
        found["error"] = f"UNEXPECTED {type(error).__name__}: {error}"
    found["commands"] = [problem for command in commands if (problem := run(command, forgery.root))]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["astray"] = [path for path in opened if "canary" in path]
    found["imported"] = sorted(set(sys.modules) - modules)
    found["canary"] = canary(forgery) == before
    found["damage"] = [event["reason"] for event in damage_events(forgery.root)]
    found["wrong"] = wrong(found["step"], state, model)
    return found


def run(command: str, root: Path) -> str | None:
    """What a command of the CLI raised, if it did not end as it should."""
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["stepwell", command, str(root), "--json"]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            cli.main()
        except SystemExit as end:
            return None if end.code in (0, 1, 2, None) else f"{command}: exit code {end.code}"
        except BaseException as error:
            return f"{command}: {type(error).__name__}: {error}"
    return None


def wrong(step: int | None, state: dict[str, Any], model: torch.nn.Module) -> str | None:
    """Where the restored state is not that of the step."""
    if not step:
        return None
    state.pop("note", None)  # most attacks sit there
    expected = {key: value for key, value in values(step).items() if key != "note"}
    return difference(state, expected) or difference(dict(model.state_dict()), dict(net(step).state_dict()))


def import_class(module: str, qualname: str) -> Any:
    return getattr(importlib.import_module(module), qualname)


CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "record of 100 GB": (files, "get", lambda path, limit=0, is_constant=False: path.read_bytes()),
    "record is a link": (os, "O_NOFOLLOW", 0),
    "events are a link": (os, "O_NOFOLLOW", 0),
    "record name ../": (manifest, "check_file_name", lambda name, path: name),
    "named tuple of another length": (tree, "_find_class", import_class),
    "a leaf ten thousand times": (
        flatten._Builder,
        "_array",
        lambda self, said: self._leaf(said["leaf"]).numpy().copy(),
    ),
    "header with other names": (verified_read, "check_header", lambda *_: None),
}
"""Each of these attacks gets through with one safety off."""


def main() -> None:
    logging.getLogger("stepwell").addHandler(logging.NullHandler())
    sys.addaudithook(note)
    base, is_whole = Path(sys.argv[1]), "all" in sys.argv[2:]
    for number, name in enumerate(ATTACKS):
        commands = COMMANDS if is_whole else (COMMANDS[number % len(COMMANDS)],)
        print(json.dumps(attack(name, base / str(number), commands)), flush=True)
    for name, (owner, attribute, without) in CONTROLS.items():
        with mock.patch.object(owner, attribute, without):
            found = attack(name, base / "control" / name.replace("/", "_"))
        print(json.dumps({**found, "name": f"control: {name}"}), flush=True)


if __name__ == "__main__":
    main()
