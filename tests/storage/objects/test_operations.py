"""The operations on a bucket, on a real server: whole or not at all, once, and honest about what failed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import ConfigError, DamagedError, StorageError
from stepwell.restore.from_disk import ObjectSource
from stepwell.storage.store import files, mirror, objects
from stepwell.storage.store.lineage import open_run
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from tests.storage.objects.conftest import MakeProxy
from tests.storage.objects.proxy import Proxy, Rule
from tests.storage.objects.server import BUCKET

PART = objects.PART_BYTES


@pytest.fixture
def behind_proxy(make_proxy: MakeProxy, address: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> MakeProxy:
    """A proxy between this process and the server."""

    def make(rule: Rule) -> Proxy:
        proxy = make_proxy(rule)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        objects._client.cache_clear()
        return proxy

    return make


def test_small_objects(address: ObjectPath) -> None:
    path = address / "run.json"
    assert not files.exists(path) and not files.is_directory(address) and files.list_names(address) == []
    files.put(path, b"one", point="run")
    files.put(path, b"two", point="run")
    assert files.get(path) == b"two"
    assert files.exists(path) and not files.exists(address) and files.is_directory(address)
    files.put(address / "lineage" / "0001.json", b"x", point="lineage")
    assert files.list_names(address) == ["lineage", "run.json"]
    facts = files.facts(path)
    assert facts is not None and facts.nbytes == 3
    with pytest.raises(DamagedError, match="more than 2 bytes"):
        files.get(path, limit=2)
    with pytest.raises(DamagedError, match="no such object"):
        files.get(address / "nothing")
    files.remove(path)
    files.remove(path)
    assert files.list_names(address) == ["lineage"]


def test_a_name_is_given_once(address: ObjectPath) -> None:
    """Many at once: one has it, and all read what that one wrote."""
    won: list[int] = []

    def try_it(number: int) -> None:
        if files.put_new(address / "0001.json", b"%d" % number, point="lineage"):
            won.append(number)

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.get(address / "0001.json") == b"%d" % won[0]


def test_an_answer_that_was_lost(address: ObjectPath, behind_proxy: MakeProxy) -> None:
    """The object is there and nobody said so: the client asks again, is told that the name is taken, and it is ours."""
    lost: list[str] = []

    def lose_first(method: str, path: str) -> str | None:
        if method == "PUT" and not lost:
            lost.append(path)
            return "lose"
        return None

    behind_proxy(lose_first)
    assert files.put_new(address / "0001.json", b"mine", point="lineage")
    assert lost
    assert not files.put_new(address / "0001.json", b"another", point="lineage")
    assert files.get(address / "0001.json") == b"mine"


def test_a_large_object_and_its_ranges(address: ObjectPath) -> None:
    data = os.urandom(PART) * 2 + os.urandom(777)
    path = address / "rank-00000.safetensors"
    view = memoryview(data)
    objects.upload(path, (view[start : start + PART] for start in range(0, len(data), PART)), PART)
    buffer = memoryview(bytearray(8192))
    source = ObjectSource(path)
    for start, nbytes in ((0, 1), (PART - 3, 4096), (len(data) - 777, 777)):
        assert bytes(source.read(start, nbytes, buffer)) == data[start : start + nbytes]
    with pytest.raises(DamagedError, match="ends at"):
        source.read(len(data) - 5, 10, buffer)
    with pytest.raises(DamagedError, match="no such object"):
        ObjectSource(address / "nothing").read(0, 1, buffer)
    files.share(path, address / "again")
    again = files.facts(address / "again")
    assert again is not None and again.nbytes == len(data)


def test_an_upload_that_is_given_up_leaves_no_object(address: ObjectPath) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(PART))
        yield memoryview(bytes(PART))
        raise KeyError("given up")

    with pytest.raises(KeyError, match="given up"):
        objects.upload(address / "shard", pieces(), PART)
    assert files.list_names(address) == []


def test_a_stream_without_its_end_leaves_no_object(address: ObjectPath) -> None:
    stream = objects.Upload(address / "shard", 3 * PART)
    for _ in range(2):
        stream.write(memoryview(bytes(PART)))
    del stream
    assert files.list_names(address) == []


def test_events_are_sent_again_when_they_have_grown(address: ObjectPath) -> None:
    paths, seen = RunPaths(address), dict[str, objects.ObjectFacts]()
    mirror.fetch(paths)

    def there() -> int:
        found = files.facts(address / "events.jsonl")
        return -1 if found is None else found.nbytes

    sizes = []
    for nbytes, is_last in ((800, False), (850, False), (900, False), (901, True)):
        paths.events.write_bytes(bytes(nbytes))
        mirror.publish(paths, seen, is_last=is_last)
        sizes.append(there())
    assert sizes == [800, 800, 900, 901]
    paths.events.unlink()
    mirror.fetch(paths)
    assert paths.events.stat().st_size == 901


def test_parts_are_as_many_as_a_service_takes() -> None:
    for nbytes in (1, PART, 10**9, 10**12, 5 * 10**12):
        part = objects.part_bytes(nbytes)
        assert part % PART == 0 and -(-nbytes // part) <= 10_000


def test_a_server_that_refuses_is_no_damage(address: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong keys, for instance: nothing is said about what lies there."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    objects._client.cache_clear()
    for call in (files.get, files.list_names, files.exists):
        with pytest.raises(StorageError, match=str(address)):
            call(address / "x")


def test_a_service_that_gives_names_twice_is_refused(address: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such services exist. Here the client leaves the condition away: a signed request cannot be changed on its way."""
    import obstore

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *args, mode=None, **rest: put(*args, **rest))
    with pytest.raises(ConfigError, match="gives a name twice"):
        open_run(RunPaths(address), seed=1)


def test_addresses() -> None:
    path = ObjectPath.parse("s3://models//runs/7/")
    assert (path.bucket, path.key, path.name) == ("s3://models", "runs/7", "7")
    assert str(path / "run.json") == "s3://models/runs/7/run.json" and (path / "run.json").parent == path
    assert str(ObjectPath.parse("gs://models")) == "gs://models"
    assert RunPaths.at("az://box/run").root == ObjectPath("az://box", "run")
    assert RunPaths.at("runs/7").root == Path("runs/7")
    for text in ("ftp://a/b", "s3://", "s3://a/../b", "://x"):
        with pytest.raises(ConfigError, match="give a directory"):
            ObjectPath.parse(text)


def test_without_the_client_a_person_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'stepwell\[s3\]'"):
        ObjectPath.parse("s3://models/run")


def test_the_desk_of_a_run_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_DESK", str(tmp_path))
    one, two = RunPaths.at(f"s3://{BUCKET}/a"), RunPaths.at(f"s3://{BUCKET}/b")
    assert one.desk != two.desk and one.desk.parent == two.desk.parent == tmp_path
    assert one.events.parent == one.progress.parent == one.history.parent == one.desk
    assert RunPaths(tmp_path).desk == tmp_path
