"""The parts of hot restart that need no job: pulse, gate, options, node ids, ports, the store's command."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from stepwell.errors import ConfigError, DamagedError
from stepwell.launch import exit_status
from stepwell.launch.conf import Conf, read_conf
from stepwell.launch.exit_status import LaunchEnded
from stepwell.launch.health import why_refused
from stepwell.launch.meeting_point import hold_port, own_address
from stepwell.launch.pulse import Pulse
from stepwell.launch.rendezvous import create
from stepwell.launch.round import RoundStore
from stepwell.storage.format.document import seal
from stepwell.storage.store.node_id import node_id
from tests.crash.harness import wait_for


def test_silence_is_counted_by_our_own_clock_and_only_while_we_look() -> None:
    pulse = Pulse(0.5)
    assert pulse.look({"a": b"1", "b": b"1"}, 100.0) == {"a": 0.0, "b": 0.0}
    for i in range(1, 5):
        silent = pulse.look({"a": b"1", "b": b"%d" % i}, 100.0 + i / 2)
    assert silent == {"a": 2.0, "b": 0.0}
    assert pulse.look({"a": b"1", "b": b"4"}, 1000.0) == {"a": 2.5, "b": 0.5}  # we were away; they are not dead
    always = Pulse(math.inf)
    always.look({"b": b"4"}, 102.0)
    assert always.look({"b": b"4"}, 1000.0) == {"b": 898.0}  # control: all clocks run on, and everybody is dead
    assert pulse.look({"a": b"2"}, 1000.5) == {"a": 0.0}
    assert pulse.look({"a": b"2", "b": b"4"}, 1001.0) == {"a": 0.5, "b": 0.0}  # it was forgotten


def test_options_are_checked() -> None:
    assert read_conf({"timeout": 900, "restarts": "5", "grace": "0.5", "probe": "nvidia-smi -L"}) == Conf(
        timeout=900.0, restarts=5, grace=0.5, probe="nvidia-smi -L"
    )
    for given, word in (
        ({"grase": "1"}, "has no option grase"),
        ({"interval": "0"}, "interval"),
        ({"interval": "soon"}, "not a number"),
        ({"misses": "1.5"}, "not a number"),
        ({"grace": "-1"}, "grace"),
        ({"spare_timeout": "nan"}, "spare_timeout"),
        ({"restarts": "-1"}, "restarts"),
        ({"store_seconds": "2"}, "interval x misses"),
    ):
        with pytest.raises(ConfigError, match=word):
            read_conf(given)


def test_every_option_is_in_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hot-restart.md").read_text()
    for name in Conf.__dataclass_fields__:
        assert f"| `{name}` |" in page, name


def test_a_good_node_passes_the_gate(tmp_path: Path) -> None:
    assert why_refused(None, Conf()) is None
    assert why_refused(tmp_path / "new", Conf(min_free_gb=0.001, probe="true")) is None
    assert list((tmp_path / "new").iterdir()) == []


def test_the_gate_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = tmp_path / "probe"
    script.write_text("#!/bin/sh\necho fine\necho 'GPU 3 fell off the bus' >&2\nexit 4\n")
    script.chmod(0o755)
    for root, conf, words in (
        (tmp_path / "file" / "x", Conf(), "cannot use it: Not a directory"),
        (tmp_path, Conf(min_free_gb=1e9), "min_free_gb asks for"),
        (None, Conf(min_free_gb=1), "min_free_gb is set, but STEPWELL_CACHE is not"),
        (tmp_path, Conf(probe=str(script)), "ended with status 4: GPU 3 fell off the bus"),
        (tmp_path, Conf(probe="sleep 60", probe_seconds=0.1), "took more than 0.1 s"),
        (tmp_path, Conf(probe="no-such-command"), "cannot run"),
    ):
        assert words in (why_refused(root, conf) or "")


def test_a_node_keeps_its_id(tmp_path: Path) -> None:
    first = node_id(tmp_path / "cache")
    assert node_id(tmp_path / "cache") == first != node_id(tmp_path / "other")
    document = json.loads((tmp_path / "cache" / "node.json").read_text())
    assert (document["format"], document["id"]) == ("stepwell.node/1", first)
    (tmp_path / "cache" / "node.json").write_bytes(seal({"format": "stepwell.node/1", "id": "../x"}))
    with pytest.raises(DamagedError, match="is no id"):
        node_id(tmp_path / "cache")


def test_all_who_make_the_id_at_once_get_the_same(tmp_path: Path) -> None:
    program = "from pathlib import Path; from stepwell.storage.store.node_id import node_id; "
    program += f"print(node_id(Path('{tmp_path}')))"
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({process.communicate()[0] for process in started}) == 1


def test_a_held_port_is_nobody_else_s_but_a_store_may_serve_there() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError), socket.socket(socket.AF_INET6) as other:
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        store.set("a", "b")
        assert store.get("a") == b"b"
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


def test_ranks_follow_from_the_slot_as_torchrun_computes_them() -> None:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

    told: list[int] = []
    for slot in range(3):
        spec = WorkerSpec(role="default", local_world_size=4, rdzv_handler=None, entrypoint="x")
        store = RoundStore(slot, 3, told.append, lambda seconds: None)
        assign = SimpleElasticAgent._assign_worker_ranks.__wrapped__
        workers = assign(None, store, slot, 3, spec)
        assert [(w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in workers] == [
            (slot * 4 + i, slot * 4 + i, 12, 12) for i in range(4)
        ]
    assert told == [4, 4, 4]


def test_the_store_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepwell.tools.cli.main", "store", "--bind", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--port-file", str(tmp_path / "port")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "port").exists, "the port is known")
    port = int((tmp_path / "port").read_text())
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    client.set("a", "b")
    again = subprocess.run([*command[:-1], str(port)], capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "Address already in use" in again.stderr
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and out == f"serving at 127.0.0.1:{port}\n"
    assert "no authentication" in err


def test_a_job_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchEnded) as ended:
        create(RendezvousParameters("stepwell", "127.0.0.1:1", "none", 1, 2))
    assert ended.value.code == exit_status.FAILED and "stepwell: name the job" in capsys.readouterr().err


def agent(tmp_path: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=stepwell", "--nnodes=1:2", *more]
    return subprocess.run(
        [*command, str(tmp_path / "never.py")], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_a_wrong_option_ends_torchrun_with_a_sentence(tmp_path: Path) -> None:
    done = agent(tmp_path, "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job", "--rdzv-conf=grase=1")
    assert done.returncode == 1 and "stepwell: --rdzv-conf has no option grase" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_a_refused_node_ends_torchrun_with_its_status(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    words = ("--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{server.port}", "--rdzv-conf=min_free_gb=1000000000")
    done = agent(tmp_path, *words, STEPWELL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == exit_status.QUARANTINED and "min_free_gb asks for" in done.stderr
    other = agent(tmp_path, *words[:2], "--nnodes=2:2")  # the last one counts
    assert other.returncode == 1 and "started with --nnodes=2:2, the job with --nnodes=1:2" in other.stderr


@pytest.mark.soak
def test_a_store_that_is_not_there_ends_torchrun_with_its_status(tmp_path: Path) -> None:
    done = agent(tmp_path, "--rdzv-id=job", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=store_seconds=4")
    assert done.returncode == exit_status.STORE_LOST and "lost the store 127.0.0.1:1" in done.stderr
