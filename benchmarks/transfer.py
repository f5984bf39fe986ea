"""How fast one node reads another node's files (`levels/peers/server`, `levels/peers/fetch`), over loopback.

    python benchmarks/transfer.py [--mib 512] [--tries 5] [--sealed | --tls FOLDER]

Server and reader are processes of their own. Prints GB/s of the best and the median try with one reader and with four,
and small questions a second. What limits them on loopback is the two processes' share of the cores, so compare runs of
one machine only. A folder for `--tls` holds cert.pem, key.pem and ca.pem.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from stepwell.levels.peers.fetch import MAX_STREAMS, Peer
from stepwell.levels.peers.server import PeerServer
from stepwell.levels.peers.tls import NAME, client_context, server_context

RUN, CHECKPOINT, SECRET = "0123456789abcdef", "step-000000000012.l0001", "ab" * 32
MIB = 1 << 20
SHARD = "rank-00000.safetensors"
QUESTIONS = 2000


def serve(root: Path, tls: str | None) -> None:
    """Until the end of standard input."""
    context = server_context(tls)
    server = PeerServer(root, SECRET, RUN, lambda question, fields: fields, bind=("127.0.0.1", 0), tls=context)
    server.start()
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


def read_all(peer: Peer, nbytes: int, readers: int) -> float:
    """GB/s of a whole file."""
    share = nbytes // readers
    rooms = [memoryview(bytearray(share)) for _ in range(readers)]
    with ThreadPoolExecutor(readers) as pool:
        began = time.perf_counter()
        list(pool.map(lambda n: peer.read(CHECKPOINT, SHARD, n * share, share, rooms[n]), range(readers)))
        return nbytes / (time.perf_counter() - began) / 1e9


def ask(peer: Peer) -> float:
    """Questions a second."""
    began = time.perf_counter()
    for number in range(QUESTIONS):
        peer.ask("state", number=number)
    return QUESTIONS / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--tls")
    parser.add_argument("--sealed", action="store_true", help="ranges have tags too")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        return serve(given.serve, given.tls)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        file = Path(place, CHECKPOINT, SHARD)
        file.parent.mkdir()
        file.write_bytes(os.urandom(MIB) * given.mib)
        command = [sys.executable, __file__, "--serve", place, *(["--tls", given.tls] if given.tls else [])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = "127.0.0.1", int(server.stdout.readline())
            tls = client_context(given.tls)
            with closing(Peer(address, SECRET, RUN, tls=tls, tls_name=NAME, is_sealed=given.sealed)) as peer:
                peer.ask("hello")
                for readers in (1, MAX_STREAMS):
                    found = [read_all(peer, given.mib * MIB, readers) for _ in range(given.tries)]
                    print(f"{readers} reader(s): {max(found):.2f} GB/s, median {statistics.median(found):.2f}")
                print(f"questions: {max(ask(peer) for _ in range(given.tries)):.0f} a second")
            server.communicate()
    return None


if __name__ == "__main__":
    main()
