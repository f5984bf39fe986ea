"""E3: nodes are lost every few epochs, 8 nodes with 4 spares; and E4: the training log, beside an uninterrupted job's.

    python benchmarks/multilevel/hot.py --out build/multilevel [--nodes 8] [--spares 4] [--epochs 10]

A node is a process group with a torchrun agent, a worker and a cache; losing it is SIGKILL to all of it, and its cache
is removed. The jobs: stepwell with levels and `--rdzv-backend=stepwell`; torchrun's own rendezvous with the same
spares, as it is and with its documented switch for restarts; and root saving on torchrun without spares. What they
train is digits.py. `hot` tells who came back and when, `log` whether training is the same to the last bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import result
from run import free_port

from stepwell.launch import exit_status
from tests.launch.cluster import Cluster, losses_in

SCRIPT = Path(__file__).with_name("digits.py")
ONE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Job(Cluster):
    """Nodes that train digits."""

    def __init__(self, folder: Path, options: argparse.Namespace, *, epochs: int, **conf: object) -> None:
        super().__init__(folder, options.nodes, options.nodes + options.spares, **conf)
        self.script = [str(SCRIPT), str(epochs), str(options.pace)]

    def came_back(self, after: float) -> float | None:
        """Seconds from a moment to the first step of a job that all ranks have begun since."""
        begun = sorted(note["time"] for note in self.notes() if "begin" in note and note["time"] > after)
        if len(begun) < self.slots:
            return None
        steps = [note["time"] for note in self.notes() if "step" in note and note["time"] > begun[self.slots - 1]]
        return steps[0] - after if steps else None

    def wait_epochs(self, count: int, after: float) -> None:
        def are_done() -> bool:
            assert not self.has_ended(), self.logs()
            return sum("accuracy" in note and note["time"] > after for note in self.notes()) >= count

        self.wait(are_done, f"{count} epochs", 300)

    def has_ended(self) -> bool:
        return all(node.agent.poll() is not None for node in self.nodes.values())


class Stock(Job):
    """The same with torchrun's own rendezvous, in the first node, and nothing of stepwell. Who is too many waits."""

    def rendezvous(self) -> list[str]:
        if not self.nodes:
            self.endpoint = free_port()
        found = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.endpoint}", "--rdzv-id=job"]
        return [*found, f"--nnodes={self.slots}", f"--rdzv-conf=is_host={'false' if self.nodes else 'true'}"]

    def environment(self, name: str) -> dict[str, str]:
        return {key: value for key, value in super().environment(name).items() if not key.startswith("STEPWELL_")}


def say(text: str) -> None:
    print(text, flush=True)


def ours(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One node lost every few epochs, until there is no spare left, and one more."""
    names = [f"n{i}" for i in range(options.nodes + options.spares)]
    job = Job(folder, options, epochs=options.epochs * (options.spares + 2), spare_timeout=5)
    losses: list[dict[str, Any]] = []
    try:
        started = time.monotonic()
        job.start(*names)
        for number in range(options.spares):
            job.wait_epochs(options.epochs, losses[-1]["at"] if losses else 0.0)
            job.wait_saved()
            before = job.ranks()
            rank = (3, 0, options.nodes - 1, 3)[number % 4] % options.nodes
            at = job.lose(before[rank])
            seconds = job.wait(lambda at=at: job.came_back(at), "all ranks make steps again", 300)
            after = job.ranks()
            moved = [rank for rank in before if before[rank] != after[rank]]
            losses.append({"rank": rank, "at": at, "seconds": seconds, "moved": moved, "source": job.sources()[-1]})
            say(f"stepwell: loss {number + 1}, rank {rank}: {seconds:.1f} s to the first new step, moved: {moved}")
        job.wait_epochs(options.epochs, losses[-1]["at"])
        last = job.ranks()
        at = job.lose(last[1])
        left = [name for rank, name in last.items() if rank != 1]
        found = job.codes(left, 300)
        say(f"stepwell: loss {options.spares + 1}: {found}")
        for loss in losses:
            loss["at"] -= started
        return {
            "losses": losses,
            "ended": {"at": at - started, "codes": sorted(set(found.values())), "expected": exit_status.OUT_OF_SPARES},
            "steps": timeline(job, started),
            "notes": [note for note in job.notes() if "accuracy" in note],
            "log": {step: sorted(found) for step, found in losses_in(folder).items()},
        }
    finally:
        job.close()


def stock(job: Stock, options: argparse.Namespace, names: list[str], restarts: int, **env: str) -> dict[str, Any]:
    """One node lost after some epochs. How long until all make steps again, if ever."""
    try:
        started = time.monotonic()
        job.start(*names, restarts=restarts, **env)
        job.wait_epochs(min(2, options.epochs), 0.0)
        ranks = {note["rank"]: note["node"] for note in job.notes() if "begin" in note}
        victim = next(name for rank, name in ranks.items() if name != names[0] and rank)  # not the rendezvous itself
        at, seconds = job.lose(victim), None
        while time.monotonic() < at + options.patience and not job.has_ended():
            if (seconds := job.came_back(at)) is not None:
                break
            time.sleep(0.5)
        begun = [note for note in job.notes() if "begin" in note]
        return {
            "seconds": seconds,
            "ended": job.has_ended(),
            "waited": time.monotonic() - at,
            "starts": len(begun) - job.slots,
            "codes": [node.agent.poll() for name, node in job.nodes.items() if name != victim],
            "lost": at - started,
            "steps": timeline(job, started),
        }
    finally:
        job.close()


def timeline(job: Job, started: float) -> list[tuple[float, int]]:
    """Seconds and step, of rank 0."""
    return [
        (round(note["time"] - started, 3), note["step"]) for note in job.notes() if "step" in note and note["rank"] == 0
    ]


def undisturbed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A job that nothing happens to."""
    job = Job(folder, options, epochs=options.epochs * (options.spares + 1))
    try:
        names = [f"n{i}" for i in range(options.nodes)]
        job.start(*names)
        job.codes(names, 600)
        return {
            "log": {step: sorted(found) for step, found in losses_in(folder).items()},
            "notes": [note for note in job.notes() if "accuracy" in note],
        }
    finally:
        job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--spares", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10, help="between two losses")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes longer than it has to")
    parser.add_argument("--patience", type=float, default=150, help="seconds in which torchrun may come back by itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = result.begin()
    with tempfile.TemporaryDirectory(dir=options.out) as name:
        folder = Path(name).resolve()
        names = [f"n{i}" for i in range(options.nodes + options.spares)]
        found["stepwell"] = ours(folder / "ours", options)
        found["undisturbed"] = undisturbed(folder / "undisturbed", options)
        write(options.out, found)
        root = Stock(folder / "root", options, epochs=10**6)
        found["root"] = stock(root, options, names[: options.nodes], 0)
        write(options.out, found)
        for key, env in (("torchrun", {}), ("torchrun, own store", {ONE_STORE: "1"})):
            job = Stock(folder / key, options, epochs=10**6)
            found[key] = stock(job, options, names, 50, **env)
            write(options.out, found)
    say((options.out / "hot.md").read_text())
    say((options.out / "log.md").read_text())


def fate(row: dict[str, Any]) -> str:
    if row["seconds"] is not None:
        return f"{row['seconds']:.1f} s"
    if row["ended"]:
        return f"never: ended after {row['waited']:.1f} s with {sorted(set(map(str, row['codes'])))}"
    return f"not within {row['waited']:.0f} s, in which workers were started {row['starts']} times"


def write(out: Path, found: dict[str, Any]) -> None:
    mine, hot = found["stepwell"], [["job", "lost", "from the kill to the first new step", "ranks that moved"]]
    for number, loss in enumerate(mine["losses"], 1):
        who = f"{number}: the node of rank {loss['rank']} and its cache"
        hot.append(["stepwell", who, f"{loss['seconds']:.1f} s, restored from {loss['source']}", loss["moved"]])
    ended = mine["ended"]
    hot.append(["stepwell", f"{len(mine['losses']) + 1}: no spare left", f"ended, exit status {ended['codes']}", ""])
    for key, name in (
        ("root", "root saving on torchrun, no spares"),
        ("torchrun", "torchrun c10d, the same spares"),
        ("torchrun, own store", f"the same with {ONE_STORE}=1"),
    ):
        if key in found:
            hot.append([name, "1: one node", fate(found[key]), ""])
    text = f"# E3: nodes are lost, {len(mine['losses'])} spares\n\n{result.table(hot)}"
    seconds = [loss["seconds"] for loss in mine["losses"]]
    text += f"\nMedian {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s.\n"

    def draw_hot(pyplot: Any) -> None:
        pyplot.figure(figsize=(9, 4))
        for key, name in (("stepwell", "stepwell"), ("root", "root saving"), ("torchrun", "torchrun c10d")):
            if key in found:
                points = found[key]["steps"]
                pyplot.plot([at for at, _ in points], [step for _, step in points], ".", ms=2, label=name)
        for loss in mine["losses"]:
            pyplot.axvline(loss["at"], color="tab:red", lw=0.6)
        pyplot.axvline(ended["at"], color="tab:red", lw=1.5, label="a node and its cache are lost")
        pyplot.xlabel("seconds")
        pyplot.ylabel("step")
        pyplot.legend()

    result.write(out, "hot", found, text, draw_hot)
    write_log(out, found)


def write_log(out: Path, found: dict[str, Any]) -> None:
    """Step by step: what the job that lost nodes logged, each step as often as it was done, against the other's."""
    mine, other = found["stepwell"]["log"], found["undisturbed"]["log"]
    both = sorted(set(mine) & set(other))
    unequal = [step for step in both if mine[step] != other[step]]
    accuracy = [
        {note["epoch"]: note["accuracy"] for note in found[key]["notes"]} for key in ("stepwell", "undisturbed")
    ]
    epochs = sorted(set(accuracy[0]) & set(accuracy[1]))
    rows = [
        ["", "steps compared", "steps that differ", "epochs compared", "accuracies that differ", "last accuracy"],
        ["stepwell", len(both), len(unequal), len(epochs), sum(accuracy[0][e] != accuracy[1][e] for e in epochs),
         f"{accuracy[0][epochs[-1]]:.4f}"],
    ]  # fmt: skip
    text = (
        "# E4: the training log with and without losses of nodes\n\nDeterministic kernels; a step counts as equal "
        f"if its loss has the same bits, each time it was done.\n\n{result.table(rows)}"
    )

    def draw(pyplot: Any) -> None:
        _, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
        for key, style in (("undisturbed", "-"), ("stepwell", ":")):
            log = found[key]["log"]
            left.plot(sorted(log), [log[step][0] for step in sorted(log)], style, lw=1, label=key)
        left.set(xlabel="step", ylabel="loss, mean of all ranks", yscale="log")
        for values, name, style in ((accuracy[1], "undisturbed", "-"), (accuracy[0], "stepwell, nodes lost", "x")):
            right.plot(sorted(values), [values[epoch] for epoch in sorted(values)], style, lw=1, label=name)
        right.set(xlabel="step", ylabel="accuracy, held-out digits")
        right.legend()

    head = {key: found[key] for key in ("command", "date", "commit", "machine")}
    counts = {"steps": len(both), "unequal": unequal, "accuracy": accuracy}  # the losses themselves are in hot.json
    result.write(out, "log", {**head, **counts}, text, draw)


if __name__ == "__main__":
    main()
