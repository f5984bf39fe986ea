"""The entry point: a table of commands whose modules load only when they are used.

Owns:    the names, the one-line summaries, and how an error reaches the person.
Holds:   no command is imported for `--help`; an error is a sentence or two on stderr and exit code 2, no traceback.
"""

from __future__ import annotations

import errno
import os
from importlib import import_module
from typing import IO, Any, Final

import click

from stepwell.errors import StepwellError
from stepwell.escape import shown

COMMANDS: Final[dict[str, str]] = {
    "ls": "stepwell.tools.cli.commands.ls:ls",
    "show": "stepwell.tools.cli.commands.show:show",
    "verify": "stepwell.tools.cli.commands.verify:verify",
    "why": "stepwell.tools.cli.commands.why:why",
    "diff": "stepwell.tools.cli.commands.diff:diff",
    "prune": "stepwell.tools.cli.commands.prune:prune",
    "clean": "stepwell.tools.cli.commands.clean:clean",
    "export": "stepwell.tools.cli.commands.export:export",
    "prove": "stepwell.tools.cli.commands.prove_command:prove",
    "store": "stepwell.tools.cli.commands.rendezvous_store:store",
    "index": "stepwell.tools.cli.scr.dataset_index:index",
    "halt": "stepwell.tools.cli.scr.halt:halt",
    "scavenge": "stepwell.tools.cli.scr.scavenge:scavenge",
    "flush": "stepwell.tools.cli.scr.scavenge:flush",
}
"""Command -> module:function."""

SUMMARIES: Final[dict[str, str]] = {
    "ls": "List the checkpoints of a run.",
    "show": "Show the content of a checkpoint.",
    "verify": "Read every byte of a run and check it.",
    "why": "Show which checkpoint a restart would use, and why not the others.",
    "diff": "Compare two checkpoints.",
    "prune": "Remove old checkpoints.",
    "clean": "Remove leftovers of interrupted saves.",
    "export": "Export a checkpoint as safetensors, torch or DCP.",
    "prove": "Kill and restart a training script, then check that the result is bit-identical.",
    "store": "Run the store for a job with spare nodes.",
    "index": "SCR interface: list datasets, choose the one to restart from.",
    "halt": "SCR interface: tell a job when to stop.",
    "scavenge": "SCR interface: save datasets from the nodes' caches after the last run.",
    "flush": "SCR interface: complete interrupted flushes.",
}
"""What `--help` says of each, so that it need not import them."""


class Problem(click.ClickException):
    """An error for the person at the terminal."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr."""
        click.echo(f"stepwell: {shown(self.format_message())}", file=file, err=True)


class Commands(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table: from looking to changing."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what stepwell or the system refuses becomes a sentence."""
        try:
            return super().invoke(ctx)
        except StepwellError as error:
            raise Problem(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # `stepwell ls | head`: click ends quietly
            where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            raise Problem(f"{where}{error.strerror or error}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stepwell", prog_name="stepwell", message="%(prog)s %(version)s")
def main() -> None:
    """Look at, check and tidy up the checkpoints of a training run.

    RUN is the directory that was given to Checkpointer; RUN@STEP or a checkpoint's own directory names one checkpoint.
    Every command takes --json for scripts.
    """


if __name__ == "__main__":
    main(prog_name="stepwell")
