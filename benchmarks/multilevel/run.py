"""E1 what checkpoints cost against the number of nodes, and E2 how long a cold restart takes. Nodes are processes.

    python benchmarks/multilevel/run.py --out build/multilevel [--model edsr] [--worlds 1,2,4,8] [--epochs 12]

Each node has a private cache; the shared place takes 200 MB/s in all, however many write or read (slow_share.c,
preloaded: needs a C compiler, no root). See trainer.py for what an iteration is. Overhead: time of all epochs but the
first against the same without checkpoints, in the same run, alternating. E1 counts only if root saving costs more
than 20 % with the most nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import result as results

from stepwell.events.journal import read_events

HERE = Path(__file__).resolve().parent
WAYS = ("root", "single", "pairs", "xor", "rs")
THROUGH = "pairs, caches lost: through the shared place"


def share_environment(folder: Path, rate: float) -> dict[str, str]:
    """Build the library; without a compiler there is nothing to measure."""
    library, compiler = folder / "slow_share.so", shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("no C compiler: slow_share.c cannot be built")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, HERE / "slow_share.c", "-ldl"], check=True)
    queue = {"STEPWELL_BENCH_QUEUE": str(folder / "queue"), "STEPWELL_BENCH_RATE": str(rate)}
    return {"LD_PRELOAD": str(library), **queue, "STEPWELL_BENCH_SHARE": str(folder / "shared")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: Path, env: dict[str, str], world: int, **what: Any) -> list[dict[str, Any]]:
    """Run all ranks to their end. What each found."""
    out = Path(tempfile.mkdtemp(dir=folder))
    given = {**what, "shared": str(folder / "shared"), "caches": what.pop("caches"), "out": str(out)}
    common = {**os.environ, **env, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "trainer.py", json.dumps(given)],
            env={**common, "RANK": str(rank), "STEPWELL_NODE": f"node{rank}", "STEPWELL_ADDRESS": "127.0.0.1"},
            stderr=subprocess.DEVNULL if rank else None,
        )
        for rank in range(world)
    ]
    statuses = [process.wait() for process in processes]
    expected = -9 if what.get("crash") else 0
    if any(status != expected for status in statuses):
        sys.exit(f"ranks ended with {statuses}")
    return [json.loads((out / f"rank.{rank}.json").read_text()) for rank in range(world)]


def restart(folder: Path, env: dict[str, str], world: int, way: str, what: dict[str, Any]) -> dict[str, float]:
    """Start all ranks again, with nothing in memory. Seconds until the slowest has its state, and of reading."""
    back = launch(folder, env, world, way=way, epochs=0, crash=True, **what)
    end_agents(folder)
    if not all(rank["is_back"] for rank in back):
        sys.exit(f"{way}: nothing was restored")
    found = {"all": max(rank["restored"] for rank in back)}
    restored = [event for event in read_events(folder / "shared/run/events.jsonl") if event["kind"] == "restore"]
    return found | ({"reading": restored[-1]["seconds"]} if restored else {})


def end_agents(folder: Path) -> None:
    """SIGKILL what was started here and outlives the ranks, known by what it inherited: no snapshot stays in memory."""
    mark = f"STEPWELL_BENCH_SHARE={folder}/".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes():
                os.kill(int(place.name), signal.SIGKILL)


def spent(found: list[dict[str, Any]], every: int) -> list[float]:
    """Seconds of each epoch but the first, of the slowest rank."""
    epochs = len(found[0]["times"]) // every
    return [max(sum(rank["times"][n * every : (n + 1) * every]) for rank in found) for n in range(1, epochs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--caches", type=Path, default=Path("/dev/shm"), help="where the nodes' caches lie")
    parser.add_argument("--model", default="resnet50", choices=("resnet50", "edsr"))
    parser.add_argument("--worlds", default="1,2,4,8")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=int, default=48, help="iterations of an epoch on one rank")
    parser.add_argument("--seconds", type=float, default=0.5, help="what an iteration takes on the accelerator")
    parser.add_argument("--rate", type=float, default=200e6, help="of the shared place, bytes a second in all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**results.begin(), "save": {}, "load": {}, "phases": {}, "processor": {}}
    for world in map(int, options.worlds.split(",")):
        every = max(1, options.images // world)
        for way in ("none", *options.ways.split(","), "none again"):
            with (
                tempfile.TemporaryDirectory(dir=options.out) as name,
                tempfile.TemporaryDirectory(dir=options.caches, prefix="stepwell-bench-") as caches,
            ):
                folder = Path(name).resolve()
                env = share_environment(folder, options.rate)
                what = {"model": options.model, "seconds": options.seconds, "every": every, "caches": caches}
                found = launch(folder, env, world, way=way.split()[0], epochs=options.epochs, crash=True, **what)
                result["save"].setdefault(way, {})[world] = spent(found, every)
                result["nbytes"] = found[0]["nbytes"]
                result["phases"].setdefault(way, {})[world] = phases(folder, found)
                result["processor"].setdefault(way, {})[world] = processor(found, options.epochs)
                end_agents(folder)
                if way.split()[0] != "none":
                    result["load"].setdefault(way, {})[world] = restart(folder, env, world, way, what)
                if way == "pairs":  # and once more, with all caches lost
                    for cache in Path(caches).iterdir():
                        shutil.rmtree(cache)
                    result["load"].setdefault(THROUGH, {})[world] = restart(folder, env, world, way, what)
            print(f"{world} nodes, {way}: done", file=sys.stderr, flush=True)
            write(options.out, result)
    print((options.out / "multilevel.md").read_text())


PHASES = {
    "stall": ("snapshot", "stall_seconds"),
    "gate": ("stall", "seconds"),
    "copy": ("snapshot", "copy_seconds"),
    "write": ("persist", "seconds"),
    "protect": ("protected", "seconds"),
    "whole": ("commit", "seconds"),
    "carry on": ("flush", "seconds"),
}
"""Where a checkpoint's time goes. Training waits in the first two alone."""


def phases(folder: Path, found: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each phase: mean over ranks and checkpoints."""
    saves = [seconds for rank in found for seconds in rank["saves"]]
    spent = {"save and wait": statistics.fmean(saves)} if saves else {}
    events = [event for path in (folder / "shared").glob("run/events*.jsonl") for event in read_events(path)]
    for name, (kind, field) in PHASES.items():
        values = [event[field] for event in events if event["kind"] == kind]
        if values:
            spent[name] = statistics.fmean(values)
    return spent


def processor(found: list[dict[str, Any]], epochs: int) -> dict[str, float]:
    """Processor seconds of an epoch, all ranks together."""
    return {who: sum(rank["processor"].get(who, 0) for rank in found) / epochs for who in ("trainer", "agent")}


def told(restart: dict[str, float]) -> str:
    reading = f" ({restart['reading']:.2f} reading)" if "reading" in restart else ""
    return f"{restart['all']:.2f}{reading}"


def overhead(result: dict[str, Any], way: str, world: int) -> float | None:
    save = result["save"]
    clean = [value for name in ("none", "none again") for value in save.get(name, {}).get(world, [])]
    mine = save.get(way, {}).get(world)
    return None if not clean or not mine else statistics.fmean(mine) / statistics.median(clean) - 1


def write(out: Path, result: dict[str, Any]) -> None:
    worlds = sorted({world for found in result["save"].values() for world in found})
    head = ["", *(f"{world} nodes" for world in worlds)]
    ways = [way for way in result["save"] if not way.startswith("none")]

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    save = [[way, *(percent(overhead(result, way, world)) for world in worlds)] for way in ways]
    noise = []
    for world in worlds:
        both = [result["save"].get(name, {}).get(world) for name in ("none", "none again")]
        noise.append(statistics.median(both[1]) / statistics.median(both[0]) - 1 if all(both) else None)
    save.append(["without, again", *map(percent, noise)])
    load = [
        [way, *(told(found[world]) if world in found else "" for world in worlds)]
        for way, found in result["load"].items()
    ]
    names = ["save and wait", *PHASES]
    spent = [
        [f"{way}, {world} nodes", *(f"{found[world][name]:.3f}" if name in found[world] else "" for name in names)]
        for way, found in result["phases"].items()
        for world in found
        if found[world]
    ]
    used = [
        [f"{way}, {world} nodes", *(f"{found[world][who]:.2f}" for who in ("trainer", "agent"))]
        for way, found in result["processor"].items()
        for world in found
    ]
    text = (
        f"# Levels: {result['nbytes'] / 1e6:.0f} MB of state\n\n"
        f"## E1: overhead of one checkpoint an epoch\n\n{results.table([head, *save])}"
        "\n## E1: seconds of each phase of a checkpoint, mean over ranks\n\nTraining waits in `save and wait`, `stall` "
        f"and `gate`; the rest goes on beside it.\n\n{results.table([['', *names], *spent])}"
        "\n## E1: processor seconds of an epoch, all nodes together\n\n"
        f"{results.table([['', 'trainers', 'agents'], *used])}"
        f"\n## E2: cold restart, seconds until all ranks have their state\n\n{results.table([head, *load])}"
    )

    def draw(pyplot: Any) -> None:
        _, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
        for way in ways:
            values = [overhead(result, way, world) for world in worlds]
            left.plot(worlds, [None if value is None else 100 * value for value in values], "o-", label=way)
        left.set(xlabel="nodes", ylabel="overhead, %", xticks=worlds, yscale="symlog", title="one checkpoint an epoch")
        left.axhline(5, color="gray", lw=0.6, ls=":")
        left.legend()
        for way, found in result["load"].items():
            right.plot(list(found), [value["all"] for value in found.values()], "o-", label=way)
        right.set(xlabel="nodes", ylabel="seconds", xticks=worlds, title="cold restart")
        right.legend()

    results.write(out, "multilevel", result, text, draw)


if __name__ == "__main__":
    main()
