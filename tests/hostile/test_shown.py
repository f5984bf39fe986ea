"""What strangers write never steers a terminal nor forges a line of a log; what is secret is not repeated.

Text goes out at three places: errors, log lines and the output of commands. Each is tried with every kind of forged
file that quotes itself, and has a control with the rule off.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from stepwell import errors, escape
from stepwell.errors import ConfigError, DamagedError, PeerError, StepwellError, StorageError
from stepwell.escape import shown, without_secrets
from stepwell.events import journal, run_events
from stepwell.events.run_events import Damage, logger
from stepwell.storage.store import catalog, objects
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import output
from tests.hostile.forge import Forgery, net, seal_text
from tests.hostile.stranger import STRANGER, as_user, machine, needs_root
from tests.restore.build import restore
from tests.tools.cli.commands import stepwell

__all__ = ["machine"]
RED = "\x1b[31mhere\x1b]0;title\x07\x9b2J\u202eevil\r\nstepwell: all is well"


def is_harmless(text: str) -> bool:
    """Nothing but visible characters, and no line that begins as one of its own."""
    first, *others = text.split("\n")
    return all(line.isprintable() for line in (first, *others)) and all(
        line.startswith("  ") for line in others if line
    )


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a terminal gets of the log."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


FORGED: dict[str, Callable[[Forgery], object]] = {
    "checksum": lambda f: f.manifest_path.write_bytes(
        f.manifest_path.read_bytes().rpartition(b',"checksum":"')[0] + b',"checksum":"' + RED.encode() + b'"}\n'
    ),
    "digest": lambda f: f.manifest(lambda d: d["records"][0].update(digest=RED)),
    "leaf": lambda f: f.leaf(name=RED),
    "codec": lambda f: f.leaf(codec=RED),
    "file name": lambda f: f.file(name=RED),
    "suspect": lambda f: f.manifest(lambda d: d.update(suspect=RED)),
    "name": lambda f: f.manifest(lambda d: d.update(name=RED)),
    "void": lambda f: (
        f.manifest_path.unlink(),
        (f.directory / "void.json").write_bytes(
            seal_text(
                json.dumps(
                    {"format": "stepwell.void/1", "run": "0" * 16, "step": 2, "repeat": 0, "lineage": 1, "rank": 0}
                    | {"reason": RED}
                )
            )
        ),
    ),
    "lineage": lambda f: f.lineage(2, parent=1, step=2, lossy=RED, host=RED),
    "event": lambda f: (f.root / "events.jsonl").write_bytes(
        json.dumps({"kind": "decision", "time": 0.0, "sentence": RED, "reason": RED}).encode() + b"\n"
    ),
    "run id": lambda f: f.run(id=RED),
}
COMMANDS = ("ls", "why", "verify", "show", "clean", "prune")


@pytest.mark.parametrize("name", FORGED)
def test_forged_text_reaches_no_terminal(tmp_path: Path, lines: io.StringIO, name: str) -> None:
    forgery = Forgery(tmp_path / "run")
    FORGED[name](forgery)
    try:
        restore(forgery.root, {"values": {}, "model": net(0)})
    except StepwellError as error:
        assert is_harmless(str(error)), str(error)
        assert "\x1b" not in "".join(traceback.format_exception(error))
    for line in lines.getvalue().splitlines():
        assert line.isprintable(), line
    for command in COMMANDS:
        answer = stepwell(command, forgery.root)
        assert answer.code in (0, 1, 2)
        for line in (*answer.out.split("\n"), *answer.err.split("\n")):
            assert line.isprintable() and not line.startswith("stepwell: all is well"), (command, line)


def test_control_without_the_rule_it_does(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path / "run")
    FORGED["checksum"](forgery)
    with mock.patch.object(errors, "shown", lambda text: text), pytest.raises(DamagedError, match="\x1b"):
        catalog.read_manifest(forgery.paths, forgery.id)


def test_a_log_line_is_one_line(lines: io.StringIO, tmp_path: Path) -> None:
    log = journal.EventLog(tmp_path / "events.jsonl", who="test")
    log.emit(Damage(directory="step-000000000002.l0001", reason=RED))
    log.close()
    logger.warning("%s says %s", "a peer", RED)
    try:
        raise ValueError(RED)
    except ValueError:
        logger.exception("failed: %s", RED)
    text = lines.getvalue()
    assert "\x1b" not in text and "\u202e" not in text and "\x9b" not in text
    assert not any(line.startswith("stepwell: all") for line in text.split("\n"))
    assert [line for line in (tmp_path / "events.jsonl").read_bytes().splitlines() if b"\x1b" in line] == []


def test_control_without_the_rule_the_log_says_what_a_stranger_wants(lines: io.StringIO) -> None:
    with mock.patch.object(run_events, "shown", lambda text: text):
        logger.warning("%s", RED)
    assert "\x1b" in lines.getvalue() and "\nstepwell: all is well" in lines.getvalue()


def test_commands_print_through_one_function(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(RED)
    output.say(RED, is_aside=True)
    output.print_wrapped(RED)
    output.print_titled(RED, RED, "red")
    output.print_table([output.Column("what")], [[RED]])
    captured = capsys.readouterr()
    for line in (*captured.out.split("\n"), *captured.err.split("\n")):
        assert line.isprintable() and not line.startswith("stepwell: all is well"), line


def test_any_text_is_harmless_afterwards_and_plain_text_stays() -> None:
    chance = random.Random(18)
    pool = "ab \n\t\r\x1b\x00\x07\x7f\x85\x9b\u2028\u202e\u200b\ud800é∞:/@?="
    for _ in range(20_000):
        text = "".join(chance.choices(pool, k=chance.randrange(12)))
        assert is_harmless(shown(text)), repr(text)
        assert shown(shown(text)) == shown(text), repr(text)
    for text in ("", "step 3 of 10", "größer ∞", "two\n  lines", "a/b@c: x?y=z"):
        assert shown(text) == text


@needs_root
def test_a_stranger_who_may_write_to_the_run_does_not_reach_the_terminal(machine: Path) -> None:
    """The same with a second user."""
    forgery = Forgery(machine / "run")
    forgery.manifest_path.chmod(0o666)
    data = forgery.manifest_path.read_bytes().rpartition(b',"checksum":"')[0]
    tail = b',"checksum":"' + RED.encode() + b'"}\n'
    as_user(STRANGER, lambda: forgery.manifest_path.write_bytes(data + tail))
    answer = stepwell("verify", forgery.root)
    assert answer.code == 1 and "checksum" in answer.out and "\x1b" not in answer.out + answer.err


# -- secrets in addresses ---------------------------------------------------------------------------------------------

SECRET = "hUnTeR2/x+y"
ADDRESSES = (
    f"s3://AKIA:{SECRET}@bucket/run",
    "s3://hUnTeR2@bucket/run",
    "s3://AKIA:hUnTeR2/run",
    "az://container/run?sv=2024&sig=hUnTeR2",
    "http://me:hUnTeR2@host/run",
    f"gs://me:{SECRET}@bucket",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunPaths.at(address)
    assert "hUnTeR2" not in str(caught.value) + str(caught.value.fields)
    answer = stepwell("ls", address)
    assert answer.code == 2 and "hUnTeR2" not in answer.out + answer.err


def test_an_at_sign_in_a_path_is_no_secret() -> None:
    assert str(ObjectPath.parse("s3://bucket/me@host/run?1")) == "s3://bucket/me@host/run?1"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "AWS_ENDPOINT"])
def test_an_endpoint_with_a_secret_is_refused_and_not_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "https://me:hUnTeR2@minio.example:9000/?X-Amz-Signature=hUnTeR2")
    with pytest.raises(ConfigError, match=rf"{name}=https://\*\*\*@minio.example:9000/") as caught:
        objects._client(f"s3://bucket-{os.urandom(4).hex()}")
    assert "hUnTeR2" not in "".join(traceback.format_exception(caught.value)) + str(caught.value.fields)


SAID = (
    "error sending request for url (https://host/b/k?X-Amz-Signature=hUnTeR2&x=1): timed out",
    "cannot connect to http://me:hUnTeR2@proxy:3128: refused",
    f"cannot use s3://AKIA:{SECRET}@bucket/run",
)


@pytest.mark.parametrize("said", SAID)
def test_what_a_client_says_is_told_without_secrets(said: str) -> None:
    """A proxy's password is legal, and a signed request has its signature in the address."""
    from obstore.exceptions import BaseError

    class Said(BaseError):  # type: ignore[misc]
        pass

    with pytest.raises(StorageError) as caught, objects._asking(ObjectPath("s3://b", "k"), "cannot be read"):
        raise Said(said)
    assert "hUnTeR2" not in "".join(traceback.format_exception(caught.value)).replace("raise Said(said)", "")
    assert "hUnTeR2" not in str(PeerError(said, path=said).fields) + str(PeerError(said))


@pytest.mark.parametrize("said", SAID)
def test_control_without_the_rule_it_is_told(said: str) -> None:
    with mock.patch.object(escape, "without_secrets", lambda text: text):
        assert "hUnTeR2" in str(PeerError(said))


def test_addresses_without_secrets_stay() -> None:
    for text in ("s3://bucket/run: step 3", "tcp://host:29500 (rank 2)", "http://host:9000/a/b: refused, me@host"):
        assert without_secrets(text) == text
