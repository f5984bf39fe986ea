"""(c) How long a killed run needs to be where it was, on seven networks, beside checkpoints at epoch boundaries.

    python benchmarks/checkfreq/recovery.py --out build/checkfreq [--quick]

A real training process under `Auto()` is killed (SIGKILL) at a random moment and started again at once; first the
trainer alone (its agent lives: restored from memory), then trainer and agent (restored from disk).

restart     from starting the process to the end of its first step: interpreter, imports, CUDA, network, restore, step
lost        steps that were done before the kill and have to be done again
recovery    from starting the process until it has done the step that the killed one was at: restart and lost work
            "without the process' start": restore, first step and lost work, without interpreter, imports, network
epoch       COMPUTED: measured iteration x iterations of an ImageNet epoch (1,281,167 images / batch); with checkpoints
            at epoch boundaries half of it is lost on average. For BERT-Large as many sequences stand in.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import record
from networks import NETWORKS
from record import ms, secs, times
from trail import Trail, count_commits
from trainer import BEGUN, BUILT, FIRST, IMPORTED, RESTORED, Lives, Warm

COMMITS = 4
"""Checkpoints of a life before it is killed."""


class TooLong(Exception):
    """A life did not reach what it was to reach."""


def wait_until(lives: Lives, reached: Callable[[], bool], until: float, what: str) -> None:
    while not reached():
        if not lives.is_alive():
            raise TooLong(f"the trainer ended before {what}: {lives.error()}")
        if time.time() > until:
            raise TooLong(f"no time was left for: {what}")
        time.sleep(0.002)


def measure(options: Any, name: str, seconds: float, dice: random.Random, source: Warm | None) -> dict[str, Any]:
    until, found = time.time() + seconds, {"network": name, "kills": []}
    with record.scratch(options) as folder:
        what = {"network": name, "device": options.device, "quick": options.quick, "precision": options.precision}
        lives = Lives(folder, source=source, **what)
        try:
            pid = lives.start()
            for agent in (False, True):
                pid = life(lives, pid, found, until=until, agent=agent, dice=dice)
        except TooLong as error:
            found["note"] = str(error)
        finally:
            lives.kill(agent=True)
    if not found["kills"]:
        return {"error": found["note"]}
    found["batch"] = 4 if options.quick else NETWORKS[name].batch
    found["brief"] = ", ".join(f"{kill['source']} {kill['recovery']:.1f} s" for kill in found["kills"])
    return found


def life(lives: Lives, pid: int, found: dict[str, Any], *, until: float, agent: bool, dice: random.Random) -> int:
    """Let it train, kill it at a random moment, start the next one and wait until it is where this one was."""
    wait_until(lives, lambda: lives.notes.now_at()[2] == pid, until + record.PATIENCE, "the first step")
    committed, begin = count_commits(lives.run), lives.notes.now_at()
    share = time.time() + max(1.0, (until - time.time()) * (0.4 if agent else 0.3))

    def has_enough() -> bool:
        return count_commits(lives.run) >= committed + COMMITS or time.time() > share

    wait_until(lives, has_enough, until + record.PATIENCE, "some checkpoints")
    decisions = Trail(lives.run).decisions()
    interval = decisions[-1]["seconds"] if decisions else 1.0
    moment = time.time() + dice.uniform(0, 2 * interval)
    wait_until(lives, lambda: time.time() > moment, until + record.PATIENCE, "the moment of the kill")
    lives.kill(agent=agent)
    step, killed, _ = lives.notes.now_at()
    iteration = (killed - begin[1]) / max(1, step - begin[0])
    following = lives.start()
    wait_until(
        lives,
        lambda: lives.notes.now_at()[2] == following and lives.notes.now_at()[0] >= step,
        until + record.PATIENCE,
        "being where the killed one was",
    )
    caught_up, reached = time.time(), lives.notes.of(following)
    restores = Trail(lives.run).of("restore")
    back = reached[RESTORED]["step"]
    restart = reached[FIRST]["time"] - lives.started
    found["iteration"] = iteration
    found["kills"].append(
        {
            "agent_killed": agent,
            "source": restores[-1]["source"] if restores else "nothing",
            "interval": interval,
            "killed_at": step,
            "restored": back,
            "lost": step - back,
            "restart": restart,
            "recovery": max(caught_up - lives.started, restart),
            "phases": _phases(lives.started, reached),
            "restore_seconds": restores[-1]["seconds"] if restores else None,
        }
    )
    return following


def _phases(started: float, reached: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of each part of the restart."""
    found, last = {}, started
    for what in (BEGUN, IMPORTED, BUILT, RESTORED, FIRST):
        found[what] = reached[what]["time"] - last
        last = reached[what]["time"]
    return found


def own_seconds(kill: dict[str, Any]) -> float:
    """Restore, first step and lost work: what is left where imports and CUDA cost nothing."""
    return kill["recovery"] - sum(kill["phases"][what] for what in (BEGUN, IMPORTED, BUILT))


def epoch_seconds(name: str, row: dict[str, Any]) -> float:
    return row["iteration"] * NETWORKS[name].iterations_per_epoch


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for name, row in result["rows"].items():
        if "error" in row:
            lines.append([record.label(name), row["error"], *[""] * 13])
            continue
        epoch, network = epoch_seconds(name, row), NETWORKS[name]
        for kill in row["kills"]:
            phases = " + ".join(secs(value) for value in kill["phases"].values())
            cells = [record.label(name), kill["source"], ms(row["iteration"]), secs(kill["interval"])]
            cells += [str(kill["lost"]), f"{kill['restart']:.1f}", phases, f"{kill['recovery']:.1f}"]
            cells.append(f"{own_seconds(kill):.1f}")
            cells += [secs(network.talk_recovery), "yes" if kill["recovery"] <= network.talk_recovery else "no"]
            half = epoch / 2 + kill["restart"]
            lines.append(
                [*cells, secs(epoch), secs(half), times(half / kill["recovery"]), secs(network.talk_epoch_recovery)]
            )
        if "note" in row:
            lines.append([record.label(name), row["note"], *[""] * 13])
    head = ["", "restored from", "iteration ms", "interval s", "lost steps", "restart s"]
    head += [
        "= interpreter + imports + network + restore + first step",
        "recovery s",
        "without the process' start s",
        "the talk s",
        "at or below",
    ]
    head += ["epoch s (computed)", "epoch-boundary recovery s (computed, average)", "ratio", "the talk, epoch-based s"]
    standby = " --standby" in result["command"]
    start = "forked from a process that had imported torch (--standby)" if standby else "cold: all is imported anew"
    return f"# Recovery after SIGKILL\n\nThe new process: {start}.\n\n{record.table(head, lines)}"


def draw(result: dict[str, Any], pyplot: Any) -> None:
    rows = {name: row for name, row in result["rows"].items() if "error" not in row}
    figure, axis = pyplot.subplots(figsize=(11, 5))
    for at, (name, row) in enumerate(rows.items()):
        epoch, talk = epoch_seconds(name, row), NETWORKS[name].talk_recovery
        bars = [(f"from {kill['source']}", kill["recovery"]) for kill in row["kills"]]
        bars += [("the talk", talk), ("half an epoch, computed", epoch / 2)]
        for shift, (_, value) in enumerate(bars):
            axis.bar(at + 0.2 * (shift - 1.5), value, 0.18, color=f"C{shift}")
            axis.text(at + 0.2 * (shift - 1.5), value, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
        if at == 0:
            for shift, (text, _) in enumerate(bars):
                axis.bar(0, 0, color=f"C{shift}", label=text)
    axis.set_xticks(range(len(rows)), [record.label(name) for name in rows])
    axis.set(yscale="log", ylabel="seconds", title="From restart to where the killed process was")
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    figure.tight_layout()


def main() -> None:
    made = record.parser(__doc__, seconds=360)
    made.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    made.add_argument("--standby", action="store_true", help="the next process is forked from one with torch imported")
    options = record.parse(made)
    sheet = record.Record("recovery", options, markdown=markdown, draw=draw)
    if options.draw:
        sheet.redraw()
        return
    dice = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        log = options.out / "nursery.log"
        source = stack.enter_context(Warm(log)) if options.standby else None
        record.for_networks(sheet, options.networks, lambda name, left: measure(options, name, left, dice, source))
    sheet.finish()


if __name__ == "__main__":
    main()
