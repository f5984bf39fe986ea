"""Running `stepwell prove` as a person does: a process of its own, and the script in tests/tools/prove/scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "tools" / "prove" / "scripts" / "train.py"
DEMO = ROOT / "examples" / "digits.py"


@dataclass(frozen=True)
class Outcome:
    """What a trial printed and wrote."""

    code: int
    stdout: str
    stderr: str
    document: dict[str, Any]


def trial_words(out: Path, command: Sequence[object], *, kills: int, seed: int, json: bool = False) -> list[str]:
    """The command line of a trial."""
    options = ["--kills", kills, "--seed", seed, "--out", out, *(["--json"] if json else [])]
    return [str(word) for word in (sys.executable, "-m", "stepwell.tools.cli.main", "prove", *options, "--", *command)]


def prove(
    out: Path, *command: object, kills: int = 1, seed: int = 1, as_json: bool = False, **environment: str
) -> Outcome:
    """Prove a command. The document is what the trial left in prove.json."""
    done = subprocess.run(
        trial_words(out, command, kills=kills, seed=seed, json=as_json),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    try:
        document = json.loads((out / "prove.json").read_text())
    except FileNotFoundError:
        document = {}
    return Outcome(done.returncode, done.stdout, done.stderr, document)


def prove_script(out: Path, *flaw: str, kills: int = 1, seed: int = 1, **environment: str) -> Outcome:
    """Prove tests/tools/prove/scripts/train.py, with or without a flaw."""
    return prove(out, sys.executable, SCRIPT, *flaw, kills=kills, seed=seed, **environment)


def processes_in(out: Path) -> list[int]:
    """Processes whose run directory lies in a trial's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"STEPWELL_WHERE={out}".encode() in environment:
            found.append(int(entry.name))
    return found
