"""Where a lingering agent can be found: an abstract socket whose name only processes of its run can make or recognise.

Owns:    the names, finding them, connecting to one.
Not:     the key behind a name (trust), what is said on a connection (agent).
Holds:   a name is a keyed hash over the rank, the process and when it began. So nobody else can take the name of an
         agent that is still to come; and a name that somebody takes after its agent's death tells of a process that is
         gone, which counts as nobody. Both ends ask the kernel who the other one is, and know only their own user.
         An agent that has no time for a caller now is not taken for gone.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import socket
import struct
from dataclasses import dataclass
from typing import Final

from stepwell.handover.channel import Channel, is_same_user, peer
from stepwell.ranks.wire.secret import derive

_PREFIX: Final = "stepwell"
_BACKLOG: Final = 4096
"""As many as the kernel allows: anybody may connect to an abstract socket, and wait in its queue."""
_LOOK_SECONDS: Final = 5.0
_TAG_BYTES: Final = 16
_ROW: Final = re.compile(rb"[0-9a-fA-F]+: \w{8} \w{8} ([0-9a-fA-F]{8}) \w{4} \w{2} +[0-9]+ @([ -~]+)\n")
"""Of /proc/net/unix: number, references, protocol, flags, type, state, inode, name."""
_ACCEPTS: Final = 1 << 16
"""Among the flags: it listens."""
_NAME: Final = re.compile(r"stepwell/([0-9a-f]{32})/(([0-9]{1,9})/([0-9]{1,20})\.([0-9]{1,20})/([0-9]{1,10}))")


@dataclass(frozen=True)
class FoundSocket:
    """The name of an agent. Of one that has died too, if somebody has taken the name since: see `may_live`."""

    name: str
    rank: int
    namespace: int
    began: int
    pid: int

    @property
    def address(self) -> str:
        return f"\0{self.name}"

    @property
    def is_here(self) -> bool:
        """Whether its process id means something to this process."""
        return self.namespace == _namespace()

    @property
    def may_live(self) -> bool:
        """False: that very process has ended, and this is another one that took its name."""
        return not self.is_here or _began(self.pid) == self.began


def place(key: bytes, run: str, identity: str) -> str:
    """The agents of a run in this very directory or bucket: a copy has the same id, and must not be given the
    original's memory. Not to be shown: who knows it can make their names.
    """
    return derive(key, "agents", f"{run}.{identity}").hex()


def listen(where: str, rank: int) -> socket.socket:
    """Where a successor of this trainer can find this agent. No file, nothing to clean. Raises OSError."""
    claim = f"{rank}/{_namespace()}.{_began(os.getpid())}/{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{_PREFIX}/{_tag(where, claim)}/{claim}")
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def find_agents(where: str, rank: int) -> list[FoundSocket]:
    """All agents of this run and rank in this network namespace that may live."""
    return sorted((found for found in _listening(where) if found.rank == rank), key=lambda found: found.name)


def find_ranks(where: str) -> list[int]:
    """Ranks of this run that have an agent in this network namespace."""
    return sorted({found.rank for found in _listening(where)})


def find_pids(where: str) -> list[int]:
    """Agents of this run, all ranks, that belong to this user: whoever listens there is asked of the kernel."""
    pids = set()
    for found in _listening(where):
        try:
            channel = connect(found, timeout=_LOOK_SECONDS)
        except TimeoutError:
            pids.add(found.pid)  # it has no time to answer: in doubt it lives
            continue
        if channel is not None:
            # Zero: it lives in another pid namespace, so its own number is all there is.
            pids.add(peer(channel.socket)[0] or found.pid)
            channel.close()
    return sorted(pids)


def _listening(where: str) -> set[FoundSocket]:
    """The table has the names of all processes and users, and any bytes may be in them: line ends, nothing at all, no
    UTF-8. Only rows that are whole and names that were made with this run's key count, each once: a name and a line end
    looks like that name, and it is the name that is called.
    """
    all_found: set[FoundSocket] = set()
    if not where:
        return all_found
    with open("/proc/net/unix", "rb") as table:
        for line in table:
            row = _ROW.fullmatch(line)
            name = _NAME.fullmatch(row[2].decode()) if row is not None and int(row[1], 16) & _ACCEPTS else None
            if name is not None and hmac.compare_digest(name[1], _tag(where, name[2])):
                found = FoundSocket(name[0], *map(int, name.groups()[2:]))
                if found.may_live:
                    all_found.add(found)
    return all_found


def _tag(where: str, claim: str) -> str:
    return hmac.digest(bytes.fromhex(where), claim.encode(), "sha256")[:_TAG_BYTES].hex()


def connect(found: FoundSocket, *, timeout: float) -> Channel | None:
    """Connect to an agent of the same user; None if it is gone or somebody else's. Raises TimeoutError: its queue is
    full all the time.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The kernel's own timeout: with Python's the socket would not block, and a full queue be an error at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), 0))
        sock.connect(found.address)
        if not is_same_user(sock) or (found.is_here and peer(sock)[0] != found.pid):
            sock.close()
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        sock.settimeout(timeout)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EAGAIN, errno.EINTR):
            raise TimeoutError(f"process {found.pid} has accepted no connection for {timeout:.0f} s") from None
        return None
    return Channel(sock)


def _namespace() -> int:
    """Which set of process ids this process sees."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _began(pid: int) -> int:
    """When a process began, in ticks since the boot; 0 if there is none. The name before it may contain anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
