"""Starts the ranks of a job as real processes, kills them, starts them again, and checks what must hold afterwards.

Owns:    one run directory, its launches (each a world of ranks with a store of their own), their logs and processes.
Not:     when and whom to kill (the tests), what was trained on (ledger).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stepwell.restore.from_disk import open_file
from stepwell.restore.verified_read import read_record_leaves
from stepwell.storage.format.record import Record
from stepwell.storage.store import catalog
from tests.crash.harness import DEADLINE_SECONDS, Process, Run, Server, Trainer, _read, wait_for
from tests.ranks.ledger import Ledger

HERE = Path(__file__).parent
PRELOADED = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)
"""What a rank would otherwise import for itself, in seconds."""
TAIL_CHARACTERS = 3000


class Launch:
    """One start of all ranks, of which each has its process, log and environment."""

    def __init__(self, number: int, ranks: list[Trainer], store: Trainer) -> None:
        self.number = number
        self.ranks = ranks
        self._store = store

    @property
    def world(self) -> int:
        return len(self.ranks)

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """SIGKILL ranks (all by default) with their loader workers; their agents live on."""
        chosen = [self.ranks[rank] for rank in (range(self.world) if ranks is None else ranks)]
        for rank in chosen:
            if rank._status is None and not rank.has_ended():
                with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.kill()
        for rank in chosen:
            rank.wait()

    def wait(self, seconds: float = DEADLINE_SECONDS) -> list[int]:
        """Until all ranks ended by themselves. Their exit statuses, negative for a signal."""
        statuses = []
        for number, rank in enumerate(self.ranks):
            has_ended = rank._status is not None or rank.has_ended(seconds)
            assert has_ended, f"rank {number} still runs after {seconds:.0f} s\n{self.logs()}"
            statuses.append(rank.wait())
        self.end_store()
        return statuses

    def wait_well(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Until all ranks ended, and ended well."""
        statuses = self.wait(seconds)
        assert statuses == [0] * self.world, f"exit statuses {statuses}\n{self.logs()}"

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether any rank is gone."""
        return any(rank._status is not None or rank.has_ended(seconds / self.world) for rank in self.ranks)

    def end_store(self) -> None:
        if self._store._status is None:
            self._store.kill()
            self._store.wait()

    def logs(self) -> str:
        """The ends of what all ranks and their agents wrote."""
        return "\n".join(f"-- rank {number}\n{rank.log()[-TAIL_CHARACTERS:]}" for number, rank in enumerate(self.ranks))


class Job(Run):
    """One run directory and every process that works on it, of all ranks."""

    script = HERE / "trainer.py"

    def __init__(self, server: Server, folder: Path, *arguments: object, **env: str) -> None:
        """`arguments` and `env` hold for every launch of the script."""
        folder.mkdir(parents=True, exist_ok=True)
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        super().__init__(server, folder / "run", folder / "log", **single, **env)
        self.folder = folder
        self.arguments = arguments
        self.ledger = Ledger(folder / "ledger")
        self.launches: list[Launch] = []
        self.world = 0
        self._inside = 0
        """The process whose mounts the ranks see; 0: as everybody."""

    # -- processes ----------------------------------------------------------------------------------------------------

    def launch(
        self, world: int, *arguments: object, each: Mapping[int, Mapping[str, str]] | None = None, **env: str
    ) -> Launch:
        """Start all ranks. `each`: environment of single ranks and their agents."""
        number, port_file = len(self.launches), self.folder / f"port.{len(self.launches)}"
        store = self._fork([HERE / "store.py", port_file], self.env | {"RANK": "store"}, self.folder / "log.store")
        wait_for(port_file.exists, "the store serves")
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port_file.read_text(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of it
            "GLOO_SOCKET_IFNAME": "lo",
            "RANKS_LAUNCH": str(number),
        }
        ranks = []
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **env, **(each or {}).get(rank, {})}
            command = self.command(*self.arguments, *arguments)
            ranks.append(self._fork(command, self.env | shared | own, self.folder / f"log.{number}.{rank}"))
        self.launches.append(Launch(number, ranks, store))
        self.world = world
        return self.launches[-1]

    def command(self, *arguments: object) -> list[object]:
        """What a rank runs."""
        return [self.script, self.where, *arguments]

    def _fork(self, command: list[object], env: Mapping[str, str], log: Path) -> Trainer:
        request = {
            "start": [str(part) for part in command],
            "env": dict(env),
            "log": str(log),
            "namespace": self._inside,
        }
        self.trainers.append(Trainer(self.server, request))
        return self.trainers[-1]

    def agents_of(self, rank: int) -> list[Process]:
        """Live agents of one rank, found by what they inherited. The caller closes them."""
        mark, found = f"RANK={rank}".encode(), []
        for agent in self.agents():
            if mark in _read(agent.pid, "environ").split(b"\0"):
                found.append(agent)
            else:
                agent.close()
        return found

    def kill_agents_of(self, rank: int) -> int:
        """SIGKILL the agents of one rank; returns how many there were."""
        agents = self.agents_of(rank)
        killed = sum(agent.kill() for agent in agents)
        for agent in agents:
            agent.close()
        return killed

    def freeze(self, rank: int) -> list[Process]:
        """SIGSTOP a rank of the newest launch and its agents. The caller thaws and closes them."""
        frozen = [Process(self.launches[-1].ranks[rank].pid), *self.agents_of(rank)]
        for process in frozen:
            process.signal(signal.SIGSTOP)
        for process in frozen:
            wait_for(process.is_stopped, f"process {process.pid} is stopped")
        return frozen

    def end_everything(self) -> None:
        for launch in self.launches:
            for process in launch.ranks:
                if process._status is None:
                    process.signal(signal.SIGCONT)
                    launch.kill([launch.ranks.index(process)])
        super().end_everything()

    # -- files through which a test and the ranks talk ----------------------------------------------------------------

    def barrier(self, name: str) -> Path:
        """For `--stop STEP:path`: ranks wait in that step until the file exists."""
        return self.folder / f"barrier.{name}"

    def wait_at(self, barrier: Path, launch: Launch, ranks: Iterable[int] | None = None) -> None:
        """Until ranks (all by default) stand there."""
        for rank in range(launch.world) if ranks is None else ranks:
            sign = Path(f"{barrier}.{launch.number}.{rank}")
            self.wait_while_alive(launch, sign.exists, f"rank {rank} stands at {barrier.name}")

    def wait_committed(self, step: int, launch: Launch) -> None:
        """Until that step, or a later one, is committed."""
        self.wait_while_alive(launch, lambda: self.newest_step() >= step, f"step {step} is committed")

    def wait_step(self, step: int, launch: Launch) -> None:
        """Until some rank has done that step."""
        reached = self.ledger.last_step
        self.wait_while_alive(launch, lambda: reached(launch.number) >= step, f"step {step} is done")

    def wait_while_alive(self, launch: Launch, condition: Callable[[], Any], what: str) -> None:
        """Until the condition holds. Fails with all logs at the deadline, or as soon as a rank is gone."""
        try:
            wait_for(lambda: launch.has_ended() or condition(), what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{launch.logs()}") from None
        assert condition(), f"a rank ended before this: {what}\n{launch.logs()}"

    # -- what must hold -----------------------------------------------------------------------------------------------

    def records(self, entry: catalog.Entry) -> list[Record]:
        """The records of all ranks."""
        assert entry.manifest is not None, f"{entry.id}: {entry.damage}"
        manifest = entry.manifest
        return [catalog.read_record(self.paths, manifest, rank) for rank in range(manifest.world_size)]

    def verify(self, entry: catalog.Entry) -> Record:
        """Read a checkpoint of all ranks whole, every byte checked. The record of rank 0."""
        records = self.records(entry)
        for record in records:
            read_record_leaves(record, lambda file: open_file(entry.path / file.name), None, lambda *_: None)
        return records[0]

    def endings(self) -> list[dict[str, Any]]:
        """What the ranks of the newest launch wrote at their end, by rank."""
        paths = [Path(f"{self.where}.end.{rank}") for rank in range(self.world)]
        return [json.loads(path.read_text()) for path in paths]

    def difference(self, reference: Job) -> str | None:
        """What is not bit-identical to a run that nothing happened to, at the end or on the way."""
        for rank, (mine, theirs) in enumerate(zip(self.endings(), reference.endings(), strict=True)):
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    return f"{name} of rank {rank}"
        return self.ledger.difference(reference.ledger)

    def check_nothing_left(self) -> None:
        """No rank, no agent, no socket, no memory, no temporary file."""
        running = [process.pid for process in self.trainers if process._status is None and not process.has_ended()]
        assert not running, running
        super().check_nothing_left()
        shared = [name for name in os.listdir("/dev/shm") if "stepwell" in name and "bench" not in name]
        assert not shared, shared


class Elastic(Job):
    """The same job under a real `torchrun` on this machine, which starts all ranks again when one dies."""

    def __init__(self, server: Server, folder: Path, *arguments: object, **env: str) -> None:
        super().__init__(server, folder, *arguments, **env)
        self._runner: subprocess.Popen[bytes] | None = None

    def start_all(self, world: int, restarts: int = 3, **env: str) -> subprocess.Popen[bytes]:
        self.world = world
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        command += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command += ["--monitor-interval", "0.2", str(self.script), str(self.where), *map(str, self.arguments)]
        # Or the workers of all restarts share one store, and gloo connects to addresses of the dead (torch 2.13).
        fixed = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.env, **fixed, **env}
            self._runner = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return self._runner

    def end_everything(self) -> None:
        """torchrun first, or it would start others in their place."""
        if self._runner is not None:
            self._runner.kill()
            self._runner.wait()
        super().end_everything()  # its ranks are found as agents are: they inherited the token


class StandIn(Job):
    """A job whose checkpoints are those of `stand_in`."""

    def newest_step(self) -> int:
        path = self.where / "newest"
        return int(path.read_text()) if path.exists() else 0

    check_newest = newest_step
