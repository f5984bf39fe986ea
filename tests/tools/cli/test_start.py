"""Starting is quick because nothing heavy is loaded: shown by what is loaded, not by a clock."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from stepwell.tools.cli.main import COMMANDS, SUMMARIES
from tests.tools.cli.commands import good, stepwell

HEAVY = ("torch", "numpy", "rich", "safetensors", "asyncio")


def loaded(*arguments: object) -> set[str]:
    """Names of the modules in an interpreter of its own after it ran a command."""
    code = (
        "import sys, json\n"
        "from stepwell.tools.cli.main import main\n"
        f"main({[str(argument) for argument in arguments]!r}, prog_name='stepwell', standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("command", [["--help"], ["ls"], ["show"], ["why"], ["clean"], ["verify"], ["prune"]])
def test_a_command_loads_nothing_heavy(command: list[str], run: Path) -> None:
    arguments = command if command == ["--help"] else [*command, run]
    assert loaded(*arguments) & set(HEAVY) == set()


def test_diff_and_export_load_no_torch(made_run: Path, tmp_path: Path) -> None:
    assert loaded("diff", made_run, made_run) & set(HEAVY) == set()
    assert loaded("export", made_run, tmp_path / "out") & set(HEAVY) == set()


def test_control_a_command_that_needs_torch_is_seen_to_load_it(made_run: Path, tmp_path: Path) -> None:
    assert "torch" in loaded("export", made_run, tmp_path / "out", "--format", "torch")


def test_help_loads_no_command() -> None:
    modules = {place.partition(":")[0] for place in COMMANDS.values()}
    assert loaded("--help") & modules == set()


def test_every_command_of_the_table_is_there_and_in_the_help() -> None:
    assert SUMMARIES.keys() == COMMANDS.keys()
    for name, place in COMMANDS.items():
        module, function = place.split(":")
        command = getattr(import_module(module), function)
        assert isinstance(command, click.Command), name
        assert command.name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str) -> None:
    assert "--json" in good(name, "--help").out


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.tools.cli.main", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "stepwell")


def test_an_unknown_command_is_refused() -> None:
    answer = stepwell("frobnicate")
    assert answer.code == 2
    assert "No such command" in answer.err
