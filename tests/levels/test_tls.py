"""What travels between nodes can be encrypted, and then nobody without a certificate takes part."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.levels.peers.tls import client_context, server_context
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight

ARGUMENTS = ("--samples", 96, "--epochs", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority, and one certificate that all nodes share."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    place = tmp_path / "tls"
    place.mkdir()

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, cwd=place, capture_output=True)

    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 2]
    openssl("req", "-x509", *kind, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *kind, "-subj", "/CN=stepwell", "-keyout", "key.pem", "-out", "request.pem")
    (place / "names").write_text("subjectAltName=DNS:stepwell\n")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", 2, "-extfile", "names"]
    openssl("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem")
    return place


def test_a_folder_without_certificates_is_refused(tmp_path: Path) -> None:
    assert server_context(None) is client_context(None) is None
    for make in (server_context, client_context):
        with pytest.raises(ConfigError, match=r"cert\.pem, key\.pem and ca\.pem"):
            make(str(tmp_path))


@pytest.mark.soak
def test_nodes_that_speak_tls(folder: Path, make_job: MakeJob, straight: Straight) -> None:
    arguments = ("--sleep", 0.02, "--protect", "Pairs()", "--tls", folder)
    job = make_job("job", *arguments, *ARGUMENTS, kind=Cluster)
    launch = job.start("ab")
    job.wait_committed(6, launch)
    launch.kill()
    launch.wait()
    job.lose("a")
    job.start("xb").wait_well()
    assert {event["source"] for event in job.events("restore")} == {"node"}
    assert job.difference(straight(2, *ARGUMENTS)) is None
    assert not job.events("refused")
    job.check_nothing_left()
