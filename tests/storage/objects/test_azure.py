"""`az://` on Azurite, Microsoft's own emulator, where it is installed: `make test-azure` does that."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import StorageError
from stepwell.storage.store import files, objects
from stepwell.storage.store.objects import ObjectPath
from tests.storage.objects.server import free_ports
from tests.tools.cli.commands import good

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, the same everywhere."""


def _azurite() -> str | None:
    beside = Path(__file__).parents[3] / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(beside) if beside.exists() else shutil.which("azurite-blob")


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    program = _azurite()
    if program is None:
        pytest.skip("azurite is not installed (make test-azure)")
    (port,) = free_ports(1)
    options = [
        "--blobPort",
        str(port),
        "--location",
        str(tmp_path / "azure"),
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    wishes = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "STEPWELL_DESK": str(tmp_path / "desk"),
    }
    for key, value in wishes.items():
        monkeypatch.setenv(key, value)
    objects._client.cache_clear()
    try:
        _make_container(port)
        yield ObjectPath.parse("az://runs/one")
    finally:
        objects._client.cache_clear()
        process.kill()
        process.wait()


def _make_container(port: int) -> None:
    """The client makes none, so this signs the one request itself."""
    import base64
    import hashlib
    import hmac
    import http.client
    from email.utils import formatdate

    date, version = formatdate(usegmt=True), "2021-08-06"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}"
    text = "PUT" + "\n" * 12 + f"{headers}\n/{ACCOUNT}/{ACCOUNT}/runs\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            wishes = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
            wishes["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
            connection.request("PUT", f"/{ACCOUNT}/runs?restype=container", headers=wishes)
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "azurite does not answer"
            time.sleep(0.1)
        finally:
            connection.close()


def train(address: ObjectPath, steps: int) -> tuple[bool, dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(model.parameters())
    with stepwell.Checkpointer(str(address), model=model, optimizer=optimizer, policy=stepwell.Every(steps=2)) as ckpt:
        is_restored = ckpt.restore()
        while ckpt.status().step < steps:
            optimizer.zero_grad()
            model(torch.randn(2, 2048)).square().sum().backward()
            optimizer.step()
            ckpt.step()
    return is_restored, model.state_dict()


def test_a_run(address: ObjectPath, tmp_path: Path) -> None:
    """50 MB in parts; resumed with the bits of a run in a directory that never stopped."""
    assert not files.exists(address / "run.json")
    assert train(address, 5)[0] is False
    is_restored, there = train(address, 9)
    assert is_restored
    here = train(ObjectPath(address.bucket, "two"), 9)[1]
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name
    assert not files.put_new(address / "run.json", b"another", point="run")
    good("verify", address)
    assert len(good("ls", address, "--json").json["checkpoints"]) == 2
    assert os.listdir(tmp_path / "desk")
    with pytest.raises(StorageError, match="404 Not Found"):
        train(ObjectPath.parse("az://nobody/run"), 1)
