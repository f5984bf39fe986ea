"""`stepwell prove`: the trial on the terminal.

Owns:    what a person sees while it runs and when it is over. The trial itself is `stepwell.tools.prove`.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from stepwell.escape import shown
from stepwell.tools.cli.output import Column, json_option, print_json, print_table, print_titled, print_wrapped, say
from stepwell.tools.cli.wording import count, size
from stepwell.tools.prove.final_states import grouped
from stepwell.tools.prove.proof import Kill, Proof, as_document
from stepwell.tools.prove.trial import Trial
from stepwell.tools.report.timeline import why_no_picture, write_timeline

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLUMNS = [
    Column("kill", right=True),
    Column("at step", right=True),
    Column("killed"),
    Column("resumed at", right=True),
    Column("from"),
    Column("redone", right=True),
]


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=5, show_default=True, help="Number of kills.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeat the kills of an earlier trial.  [default: random]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("stepwell-prove"),
    show_default=True,
    help="Directory for both runs, their output and the picture; replaces an earlier trial there.",
)
@click.option(
    "--ignore-log", "ignore", multiple=True, metavar="NAME", help="Ignore this logged value (such as a time)."
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def prove(
    kills: int, seed: int | None, out: Path, ignore: tuple[str, ...], as_json: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND once uninterrupted and once under SIGKILLs with restarts, and compare the two bit for bit.

    COMMAND trains with stepwell and is given after `--`:  stepwell prove --kills 5 -- python train.py

    Of many ranks (stepwell prove -- torchrun --nproc-per-node 4 train.py) a kill takes one rank, one agent, or
    everything with the launcher; all ranks' states and logged values are compared.

    \b
    Exit code 0: identical. 1: different, unguarded, or the script failed after a kill.
    3: inconclusive, because a restart did not resume from a checkpoint, or kills could not be placed.
    """
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # under nohup it stays ignored
            signal.signal(number, _leave)
    with _Screen() as screen:
        drawn = secrets.randbits(31) if seed is None else seed
        proof = Trial(command, out, kills, drawn, ignore, screen).run()
    document = as_document(proof)
    missing = why_no_picture() if proof.kills else "there is nothing to plot"
    if missing is None:
        write_timeline(out / "killed" / "events.jsonl", out / "timeline.png", kills=proof.kills)
        document["timeline"] = str(out / "timeline.png")
    (out / "prove.json").write_text(json.dumps(document, indent=2) + "\n")
    if as_json:
        print_json(document)
    else:
        print_kills(proof.kills)
        print_verdict(proof, out)
        say(f"timeline: {out / 'timeline.png'}" if missing is None else f"no timeline: {missing}")
    sys.exit(proof.exit_code)


def _leave(number: int, frame: FrameType | None) -> None:
    """Unwind, which ends every process of the trial; a second Ctrl-C must not cut that short."""
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


class _Screen:
    """Lines and a bar on stderr; the bar only on a terminal."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> _Screen:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def began(self, run: str, steps: int | None) -> None:
        """A run of the script begins."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task({"reference": "uninterrupted"}.get(run, run), total=steps)

    def reached(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def said(self, text: str) -> None:
        """One line, above the bar."""
        if self._progress is not None:
            self._progress.console.print(shown(text), markup=False, highlight=False)
        else:
            say(text, is_aside=True)


def print_kills(kills: Sequence[Kill]) -> None:
    """The table: one line for each kill."""
    if not kills:
        return
    rows = []
    for kill in kills:
        if kill.resumed is None:
            resumed = ("-", "-" if kill.is_restart else "went on", "-")
        else:
            resumed = (str(kill.resumed), kill.source or "fresh", _redone(kill))
        rows.append((str(kill.number), str(kill.step), kill.victim, *resumed))
    print_table(_COLUMNS, rows)
    say()


def _redone(kill: Kill) -> str:
    return count(kill.redone or 0, "step")


def print_verdict(proof: Proof, out: Path) -> None:
    """What was shown, in words, and what to look at next."""
    colour = {"identical": "green", "inconclusive": "yellow"}.get(proof.verdict, "red")
    print_titled(proof.verdict, _headline(proof), colour)
    for line in _details(proof, out):
        print_wrapped(line, indent="    ")
    for note in proof.notes:
        print_wrapped(f"note: {note}", indent="  ")
    say(f"both runs: {out} (--seed {proof.seed} chooses the same kills)")


def _headline(proof: Proof) -> str:
    if proof.failure is not None:
        after = f"after kill {proof.failure.after}" if proof.failure.after else "without a kill"
        return f"the script ended with exit status {proof.failure.status} {after}; its last lines:"
    if proof.verdict == "inconclusive":
        return "this trial proves nothing yet"
    if proof.verdict == "identical":
        states, logs = proof.states, proof.logs
        assert states is not None and logs is not None
        ranks = f" of {proof.ranks} ranks" if proof.ranks > 1 else ""
        logged = f", {count(logs.values, 'logged value')} of {count(logs.steps, 'step')}" if logs.values else ""
        return (
            f"after {count(len(proof.kills), 'kill')} all {count(states.tensors, 'tensor')}{ranks} "
            f"({size(states.nbytes)}), {count(states.values, 'plain value')}{logged} equal the uninterrupted run's, "
            "bit for bit"
        )
    if proof.verdict == "unguarded" and (void := proof.unguarded) is not None:
        return (
            f"{void.leaf} changed while the snapshot of step {void.step} was copied. Only "
            "verify_snapshots, which prove turns on, detected it; without it a restart from there would "
            "be silently wrong"
        )
    if proof.differences:
        first = proof.differences[0]
        return f"{first.path} {first.text}"
    return "the final states are equal, but the logged values differ"


def _details(proof: Proof, out: Path) -> list[str]:
    lines = []
    if proof.failure is not None:
        lines += [f"  | {line}" for line in proof.failure.lines]
        lines.append(f"the full output is in {out / proof.failure.run}.log")
    if len(proof.differences) > 1:
        leaves = sum(item.is_tensor for item in proof.differences)
        others = len(proof.differences) - leaves
        lines.append(f"{count(leaves, 'tensor')} and {count(others, 'plain value')} differ, plain values first:")
        lines += [f"  {line}" for line in grouped(proof.differences)]
    if proof.logs is not None and (first := proof.logs.first) is not None:
        lines.append(
            f"the first logged value that differs: {first.name} at step {first.step}, "
            f"{first.uninterrupted} uninterrupted, {first.killed} killed"
        )
    if proof.place is not None:
        lines.append(f"the runs diverge {proof.place}")
    if proof.causes:
        lines += ["usual causes, most likely first:", *(f"  {cause}" for cause in proof.causes)]
    if proof.verdict == "inconclusive" and proof.failure is None:
        lines += [f"  {doubt}" for doubt in proof.doubts]
    return lines
