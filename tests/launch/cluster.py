"""Nodes as processes of this machine: one torchrun agent each, with a cache directory, a name and a log of its own.

Owns:    a job's folder, its store and nodes; killing a node means everything that carries its mark, as a power cut.
Not:     when and whom to kill (the tests).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from stepwell.events.journal import read_events
from stepwell.launch.slot_table import SlotTable, decode
from tests.crash.harness import Process, _read, wait_for

HERE = Path(__file__).parent
MARK = "LAUNCH_MARK"
STORE = "store"
Losses = dict[int, set[float]]
DEADLINE_SECONDS = 90.0
POLL_SECONDS = 0.1


def marked(mark: str) -> list[Process]:
    """Live processes of one node's life. The caller closes them."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0"):
            with contextlib.suppress(OSError):
                found.append(Process(pid))
    return found


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """What all workers wrote, by time."""
    found = []
    for path in folder.glob("steps.*.jsonl"):
        for line in path.read_text().splitlines():
            found.append({**json.loads(line), "node": path.name.split(".")[1]})
    return sorted(found, key=lambda note: note["time"])


def losses_in(folder: Path) -> Losses:
    """Of every step, redone ones too."""
    found: Losses = {}
    for note in notes_in(folder):
        if "step" in note:
            found.setdefault(note["step"], set()).add(note["loss"])
    return found


class Node:
    """One life of an agent."""

    def __init__(self, name: str, agent: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.name = name
        self.agent = agent
        self.mark = mark
        self.log = log

    def signal_all(self, number: int) -> None:
        for process in marked(self.mark):
            process.signal(number)
            process.close()

    def kill(self) -> float:
        """SIGKILL everything of it, agent first. When it was."""
        self.agent.kill()
        at = time.monotonic()
        wait_for(self._sweep, f"{self.name} is gone")
        self.agent.wait()
        return at

    def _sweep(self) -> bool:
        left = marked(self.mark)
        for process in left:
            process.kill()
            process.close()
        return not left

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Cluster:
    """One job: a store, nodes, and what they wrote."""

    address = "127.0.0.1"
    """Where the store listens."""

    def __init__(
        self, folder: Path, slots: int, most: int, *, epochs: int = 6, pace: float = 0.1, **conf: object
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.slots = slots
        self.most = most
        self.script = [str(HERE / "train.py"), str(epochs), str(pace)]
        self.conf = conf
        self.env: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}
        self.lives: list[Node] = []
        self.store = self._start_store()
        self.port = int((folder / "port").read_text())

    def _start_store(self) -> subprocess.Popen[bytes]:
        command = [*self.onto(STORE), sys.executable, "-m", "stepwell.tools.cli.main", "store", "--bind", self.address]
        command += ["--port", "0", "--port-file", str(self.folder / "port")]
        with (self.folder / "store.log").open("wb") as log:
            store = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: (self.folder / "port").exists() or store.poll() is not None, "the store serves")
        assert store.poll() is None, (self.folder / "store.log").read_text()
        return store

    def onto(self, name: str) -> list[str]:
        """What begins a command that is to run on a node; by default all of them are this machine."""
        return []

    def start(self, *names: str, restarts: int = 50, workers: int = 1, **env: str) -> None:
        """Start agents; a name that was there before is the same node again, with what its cache still holds."""
        for name in names:
            mark = uuid.uuid4().hex
            command = [*self.onto(name), sys.executable, "-m", "torch.distributed.run", *self.rendezvous()]
            command += [f"--nproc-per-node={workers}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
            own = {MARK: mark, **self.environment(name), **self.env, **env}
            log = self.folder / f"log.{name}.{len(self.lives)}"
            with log.open("wb") as file:
                agent = subprocess.Popen(
                    [*command, *self.script],
                    env={**os.environ, **own},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            self.nodes[name] = Node(name, agent, mark, log)
            self.lives.append(self.nodes[name])

    def rendezvous(self) -> list[str]:
        """Options of torchrun: how the agents find each other."""
        found = ["--rdzv-backend=stepwell", f"--rdzv-endpoint={self.address}:{self.port}", "--rdzv-id=job"]
        found += [f"--nnodes={self.slots}:{self.most}"]
        conf = ",".join(f"{key}={value}" for key, value in self.conf.items())
        return [*found, f"--rdzv-conf={conf}"] if conf else found

    def environment(self, name: str) -> dict[str, str]:
        """Of everything on a node."""
        return {
            "LAUNCH_FOLDER": str(self.folder),
            "LAUNCH_NAME": name,
            "STEPWELL_CACHE": str(self.cache(name)),
            "STEPWELL_NODE": name,
            "STEPWELL_LINGER": "20",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

    def cache(self, name: str) -> Path:
        return self.folder / f"cache.{name}"

    def lose(self, name: str) -> float:
        """The node is gone, and what it had on its own disks too."""
        at = self.nodes[name].kill()
        shutil.rmtree(self.cache(name), ignore_errors=True)
        return at

    # What the workers wrote

    def notes(self) -> list[dict[str, Any]]:
        return notes_in(self.folder)

    def ranks(self) -> dict[int, str]:
        """Who had which rank in the newest round that all ranks have begun."""
        begun = [note for note in self.notes() if "begin" in note]
        lineages = sorted({note["lineage"] for note in begun}, reverse=True)
        for lineage in lineages:
            now = {note["rank"]: note["node"] for note in begun if note["lineage"] == lineage}
            if len(now) == self.slots:
                return now
        return {}

    def rounds(self) -> int:
        return len({note["lineage"] for note in self.notes() if "begin" in note})

    def wait_saved(self) -> None:
        """Until this start of the workers has a checkpoint that is whole, in the caches or in the run."""

        def is_saved() -> bool:
            newest = f".l{len(list((self.folder / 'run' / 'lineage').glob('*.json'))):04d}"
            return any(newest in path.parent.name for path in self.folder.glob("**/step-*/manifest.json"))

        self.wait(is_saved, "a checkpoint is whole")

    def sources(self) -> list[str]:
        """Where rank 0 restored from, in order."""
        return [
            event["source"] for event in read_events(self.folder / "run" / "events.jsonl") if event["kind"] == "restore"
        ]

    def wait_steps(self, more: int = 1, after: float = 0.0) -> float:
        """Until all ranks did some steps after a moment. When the first of them was."""

        def first() -> float | None:
            steps = [note for note in self.notes() if "step" in note and note["time"] > after]
            each = [sum(note["rank"] == rank for note in steps) for rank in range(self.slots)]
            return steps[0]["time"] if min(each) >= more else None

        found: float = self.wait(first, f"{more} steps of all ranks")
        return found

    def wait_back(self, after: float, rounds: int) -> float:
        """Until a new round makes steps. Seconds from `after` to the first of them."""

        def first() -> float | None:
            begun = [note for note in self.notes() if "begin" in note]
            lineages = sorted({note["lineage"] for note in begun})
            if len(lineages) <= rounds:
                return None
            start = min(note["time"] for note in begun if note["lineage"] == lineages[rounds])
            steps = [note["time"] for note in self.notes() if "step" in note and note["time"] > start]
            return steps[0] if steps else None

        return float(self.wait(first, "the first step of a new round")) - after

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
        """Poll until it gives something true; fail with all logs. Not often: the nodes need the cores."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.logs()}"
            time.sleep(POLL_SECONDS)
        return found

    def codes(self, names: Iterable[str] | None = None, seconds: float = DEADLINE_SECONDS) -> dict[str, int]:
        """Wait until these agents (all by default) ended by themselves. Their exit statuses."""
        chosen = list(self.nodes if names is None else names)
        agents = {name: self.nodes[name].agent for name in chosen}
        self.wait(lambda: all(agent.poll() is not None for agent in agents.values()), f"{chosen} end", seconds)
        return {name: agent.returncode for name, agent in agents.items()}

    def check_log(self, expected: Losses) -> None:
        """Every step has the loss of the undisturbed job, whoever did it and however often."""
        assert losses_in(self.folder) == expected

    def logs(self) -> str:
        return "\n".join(f"-- {life.log.name}\n{life.text()[-3000:]}" for life in self.lives)

    def table(self) -> SlotTable:
        """As the store has it now."""
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=10))
        return decode(store.get("stepwell/job/slots"))

    def close(self) -> None:
        for node in self.lives:
            node.signal_all(signal.SIGCONT)
            node.kill()
        self.store.kill()
        self.store.wait()
