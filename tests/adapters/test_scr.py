"""SCR's interface in one process: files that come back, parameters, the index, halting, and what goes when."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from stepwell.adapters import scr
from stepwell.adapters.scr.parameter_sources import Config
from stepwell.adapters.scr.parameters import HONOURED, IGNORED, Settings, settle
from stepwell.adapters.scr.prefix_index import Halt, Prefix
from stepwell.errors import ConfigError
from stepwell.levels.level_spec import Partner, ReedSolomon, Single, Xor
from stepwell.storage.store.lineage import create_next
from stepwell.tools.cli.main import main
from tests.adapters.scr_job import flip
from tests.adapters.test_scr_states import end, no_waiting_for_the_disk, place

__all__ = ["no_waiting_for_the_disk", "place"]


def write(name: str, files: dict[str, bytes], flags: int = scr.FLAG_CHECKPOINT, *, valid: bool = True) -> bool:
    scr.start_output(name, flags)
    for path, data in files.items():
        Path(scr.route_file(path)).write_bytes(data)
    return scr.complete_output(valid)


def read(*paths: str) -> list[bytes]:
    return [Path(scr.route_file(path)).read_bytes() for path in paths]


def test_files_in_directories_come_back_from_the_cache_and_from_the_prefix(place: Path) -> None:
    wanted = {
        "ckpt.1/a/model.bin": os.urandom(3 << 20),
        "ckpt.1/b/model.bin": b"the same name elsewhere",
        "ckpt.1/with space and ünicode": b"odd",
        "ckpt.1/empty": b"",
        str(place / "ckpt.1" / "absolute"): b"x" * 5000,
    }
    scr.config("SCR_FLUSH=1")
    scr.init()
    assert scr.have_restart() is None
    assert write("ckpt.1", wanted)
    scr.finalize()
    for path, data in wanted.items():
        assert (place / path).read_bytes() == data, "the program's own paths"
    for lost in (None, "cache"):
        if lost is not None:
            os.rename(place / lost, place / "gone")
        scr.init()
        assert scr.have_restart() == "ckpt.1"
        assert scr.start_restart() == "ckpt.1"
        assert read(*wanted) == list(wanted.values())
        with pytest.raises(RuntimeError, match=r"not in 'ckpt\.1'"):
            scr.route_file("ckpt.1/other")
        assert scr.complete_restart()
        scr.finalize()


def test_the_listings_of_the_talk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCR-Exa's two listings, with its parameters; only what stands for `...` is ours."""
    for key, value in {"SCR_FLUSH_ASYNC": "1", "SCR_COPY_TYPE": "SINGLE", "SCR_FLUSH": "10"}.items():
        monkeypatch.setenv(key, value)
    ddp_model, rank, map_location = torch.nn.Linear(4, 3), 0, "cpu"
    loaded: list[dict[str, torch.Tensor]] = []

    def save_checkpoint(epoch: int) -> None:
        if scr.need_checkpoint():
            name = f"epoch.{epoch}"
            # All processes tell SCR-Exa a new checkpoint is about to start
            scr.start_output(name, scr.FLAG_CHECKPOINT)
            fname = f"{name}/rank_{rank}.pt"
            # Get the full path and file name SCR-Exa will need to access the checkpoint file
            newfname = scr.route_file(fname)
            valid = True
            # Save DNN
            torch.save(ddp_model.state_dict(), newfname)
            # All processes tell SCR-Exa the checkpoint is over
            scr.complete_output(valid)

    def restart(epoch: int) -> None:
        while True:
            # Is there a checkpoint available?
            if not scr.have_restart():
                break
            # All processes tell SCR-Exa that a new restart is about to start
            name = scr.start_restart()
            fname = f"{name}/rank_{rank}.pt"
            # Get the full path and file name SCR-Exa will need to access the checkpoint file
            newfname = scr.route_file(fname)
            # Load DNN
            loaded.append(torch.load(newfname, map_location=map_location))
            valid = True
            # All processes tell SCR-Exa the restart is over
            scr.complete_restart(valid)

    scr.init()
    restart(0)
    for epoch in range(12):
        save_checkpoint(epoch)
    scr.finalize()
    assert not loaded
    assert [item.name for item in Prefix(place).datasets()] == ["epoch.11", "epoch.9"], "each 10th, and the last"
    scr.init()
    restart(0)
    scr.finalize()
    assert len(loaded) == 1
    assert all(torch.equal(value, ddp_model.state_dict()[key]) for key, value in loaded[0].items())


def test_the_names_are_those_of_scr() -> None:
    functions = "config init finalize route_file have_restart start_restart complete_restart need_checkpoint "
    functions += "start_output complete_output should_exit current delete drop"
    assert set(scr.__all__) == {*functions.split(), "FLAG_NONE", "FLAG_CHECKPOINT", "FLAG_OUTPUT", "ScrError"}
    assert (scr.FLAG_NONE, scr.FLAG_CHECKPOINT, scr.FLAG_OUTPUT) == (0, 1, 2)


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_an_output(place: Path) -> None:
    scr.init()
    for name, flags in [("a\nb", 1), ("x", 4), ("x", -1), ("x" * 2000, 1)]:
        with pytest.raises(RuntimeError, match="start_output"):
            scr.start_output(name, flags)
    scr.start_output("one", scr.FLAG_CHECKPOINT)
    for path in ("/elsewhere/x", "../x", ".stepwell-scr/run.json", "x" * 2000, str(place)):
        with pytest.raises(RuntimeError, match=r"prefix|bytes"):
            scr.route_file(path)
    os.symlink("/etc/passwd", scr.route_file("link"))
    assert scr.complete_output() is False, "a link is not what was to be written"
    assert scr.have_restart() is None


def test_a_discarded_output_leaves_the_older_one(place: Path) -> None:
    scr.init()
    assert write("one", {"f": b"1"})
    assert not write("two", {"f": b"2"}, valid=False)
    scr.start_output("three", scr.FLAG_CHECKPOINT)
    scr.route_file("never written")
    assert scr.complete_output() is False
    assert scr.have_restart() == "one"
    assert len(list(place.glob("cache/*/stepwell-scr/runs/*/step-*"))) == 1, "nothing is left of them"


def test_two_stay_in_the_cache_and_older_ones_go(place: Path) -> None:
    scr.config("SCR_CACHE_SIZE=1")
    scr.config("SCR_FLUSH=0")
    scr.init()
    for number in range(5):
        write(f"c{number}", {"f": b"%d" % number})
    assert len(list(place.glob("cache/*/stepwell-scr/runs/*/step-*"))) == 2
    assert Prefix(place).datasets() == []


def test_output_goes_to_the_prefix_and_is_no_restart(place: Path) -> None:
    scr.config("SCR_FLUSH=0")
    scr.init()
    write("result", {"plot.png": b"png"}, scr.FLAG_OUTPUT)
    assert (place / "plot.png").read_bytes() == b"png"
    assert scr.have_restart() is None
    write("both", {"state": b"s"}, scr.FLAG_OUTPUT | scr.FLAG_CHECKPOINT)
    assert (place / "state").read_bytes() == b"s"
    assert scr.have_restart() == "both"


def test_output_does_not_push_a_checkpoint_out(place: Path) -> None:
    scr.config("SCR_FLUSH=0")
    scr.init()
    write("c1", {"f": b"1"})
    write("c2", {"f": b"2"})
    for number in range(5):
        write(f"o{number}", {f"o{number}": b"o"}, scr.FLAG_OUTPUT)
    assert len(list(place.glob("cache/*/stepwell-scr/runs/*/step-*"))) <= 3
    assert scr.have_restart() == "c2"


def test_a_path_that_cannot_be_taken_costs_the_name_alone(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    (place / "f").mkdir()
    (place / "f" / "in the way").touch()
    assert write("one", {"f": b"1"})
    scr.finalize()
    assert [item.name for item in Prefix(place).datasets()] == ["one"]
    (place / "f" / "in the way").unlink()
    (place / "f").rmdir()
    scr.init()
    assert (place / "f").read_bytes() == b"1"


def test_scr_current_is_followed_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    for number in (1, 2, 3):
        write(f"c{number}", {"f": b"%d" % number})
    scr.finalize()
    monkeypatch.setenv("SCR_CURRENT", "c2")
    scr.init()
    assert scr.have_restart() == "c2"
    scr.start_restart()
    assert read("f") == [b"2"]
    scr.complete_restart()
    write("c4", {"f": b"4"})
    scr.finalize()
    scr.init()
    assert scr.have_restart() == "c4", "what followed it, not the same one for ever"


def test_bypass_writes_to_the_prefix_alone(place: Path) -> None:
    scr.config("SCR_CACHE_BYPASS=1")
    scr.init()
    for number in range(3):
        assert write(f"c{number}", {"newest": b"%d" % number, f"c{number}/f": b"own"})
    assert not (place / "cache").exists()
    assert (place / "newest").read_bytes() == b"2"
    scr.finalize()
    newest = next((place / ".stepwell-scr").glob("step-000000000003*"))
    flip(next(path for path in newest.glob("rank-*.file") if path.read_bytes() == b"own"), 0)
    scr.init()
    assert scr.have_restart() == "c1", "the newest is damaged"
    scr.start_restart()
    assert read("newest", "c1/f") == [b"1", b"own"]
    assert scr.complete_restart()


def test_prefix_size(place: Path) -> None:
    scr.config("SCR_PREFIX_SIZE=2")
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("kept", {"kept/plot": b"p"}, scr.FLAG_OUTPUT)
    for number in range(4):
        write(f"c{number}", {f"c{number}/f": b"x", "latest": b"%d" % number})
    assert [item.name for item in Prefix(place).datasets()] == ["c3", "c2", "kept"]
    assert sorted(path.name for path in place.iterdir() if path.name.startswith("c") and path.name != "cache") == [
        "c2",
        "c3",
    ]
    assert (place / "latest").read_bytes() == b"3", "a name that stands for newer bytes stays"


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_damage_in_cache_and_prefix_leads_to_the_older_one(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("one", {"f": b"1" * 3000})
    write("two", {"f": b"2" * 3000})
    scr.finalize()
    for path in place.rglob("step-000000000002*/rank-*.file"):
        flip(path)
    scr.init()
    assert scr.have_restart() == "one"
    scr.start_restart()
    assert read("f") == [b"1" * 3000]
    scr.complete_restart()


def test_control_without_the_check_the_damage_is_handed_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.adapters.scr.all_caches.check_document", lambda path: None)
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("one", {"f": b"1" * 3000})
    scr.finalize()
    (path,) = place.glob("cache/*/*/runs/*/step-*/rank-*.file")
    flip(path)
    scr.init()
    assert scr.have_restart() == "one"
    scr.start_restart()
    assert read("f") != [b"1" * 3000]


def test_damage_in_the_cache_is_repaired_from_the_prefix(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("one", {"f": b"1" * 3000})
    scr.finalize()
    (path,) = place.glob("cache/*/*/runs/*/step-*/rank-*.file")
    flip(path)
    scr.init()
    assert scr.have_restart() == "one"
    scr.start_restart()
    assert read("f") == [b"1" * 3000]


def test_what_a_program_refused_is_not_offered_again(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    for number in (1, 2):
        write(f"c{number}", {"f": b"%d" % number})
    assert scr.have_restart() == "c2"
    scr.start_restart()
    assert scr.complete_restart(False) is False
    assert scr.have_restart() == "c1"
    scr.finalize()
    scr.init()
    assert scr.have_restart() == "c1"


def test_current_drop_and_delete(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    for number in range(1, 5):
        write(f"c{number}", {f"c{number}/f": b"%d" % number})
    scr.drop("c4")
    assert scr.have_restart() == "c3"
    assert (place / "c4" / "f").exists()
    scr.delete("c3")
    assert not (place / "c3").exists()
    assert not list(place.rglob("step-000000000003*"))
    assert scr.have_restart() == "c2"
    for call in (scr.delete, scr.drop, scr.current):  # as in SCR
        call("c3")
        assert f"{call.__name__}('c3') did nothing: there is no such dataset" in caplog.text
    assert scr.have_restart() == "c2"
    scr.current("c1")  # the program loaded it by itself
    write("c5", {"c5/f": b"5"})
    assert scr.have_restart() == "c5"
    scr.start_restart()
    assert not scr.complete_restart(False)
    assert scr.have_restart() == "c1", "c2 is another history by now"


def test_fetch_and_distribute_can_be_switched_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scr.config("SCR_FLUSH=2")
    scr.init()
    for number in range(1, 4):
        write(f"c{number}", {"f": b"%d" % number})
    scr._program.job.settings.__dict__["flush"] = 0  # type: ignore[union-attr]  # or finalize would carry c3 too
    scr.finalize()
    for settings, expected in [({"SCR_DISTRIBUTE": "0"}, "c2"), ({"SCR_FETCH": "0", "SCR_DISTRIBUTE": "0"}, None)]:
        with monkeypatch.context() as patch:
            for key, value in settings.items():
                patch.setenv(key, value)
            scr.init()
            assert scr.have_restart() == expected
            scr.finalize()


def test_purging_and_flushing_at_a_restart(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scr.config("SCR_FLUSH=0")
    scr.init()
    for number in (1, 2):
        write(f"c{number}", {f"c{number}": b"%d" % number})
    scr.finalize()
    monkeypatch.setenv("SCR_FLUSH_ON_RESTART", "1")
    scr.init()
    assert scr.have_restart() == "c2"
    scr.start_restart()
    assert scr.complete_restart()
    assert (place / "c2").read_bytes() == b"2"
    scr.finalize()
    monkeypatch.setenv("SCR_CACHE_PURGE", "1")
    scr.init()
    assert not list(place.glob("cache/*/*/runs/*/step-*"))
    assert scr.have_restart() == "c2", "from the prefix; the other one is gone"
    scr.start_restart()
    assert scr.complete_restart(False) is False
    assert scr.have_restart() is None


def test_a_job_that_was_overtaken_does_not_write(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("one", {"f": b"1"})
    create_next(Prefix(place).paths, parent=1, step=1)  # another job went on from there
    with pytest.raises(RuntimeError, match="lineage 2 continues"):
        scr.start_output("two", scr.FLAG_CHECKPOINT)
    scr.finalize()
    assert [item.name for item in Prefix(place).datasets()] == ["one"]


@pytest.mark.parametrize("name", ["index.json", "halt.json"])
def test_a_damaged_index_costs_what_it_said_and_no_dataset(place: Path, name: str) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    write("one", {"f": b"1"})
    scr.finalize()
    flip(place / ".stepwell-scr" / name, 20)
    scr.init()
    assert scr.have_restart() == "one"
    assert not scr.should_exit()


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("SCR_CHECKPOINT_INTERVAL=3", [False, False, True] * 2), ("SCR_CHECKPOINT_SECONDS=1000", [False] * 6)],
)
def test_need_checkpoint_by_count_and_time(place: Path, setting: str, expected: list[bool]) -> None:
    scr.config(setting)
    scr.init()
    assert [scr.need_checkpoint() for _ in range(6)] == expected


def test_need_checkpoint_without_anything_to_go_by(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    scr.init()
    assert scr.need_checkpoint() and scr.need_checkpoint()
    assert caplog.text.count("need_checkpoint() returns yes every time") == 1


def test_need_checkpoint_by_overhead(place: Path) -> None:
    scr.config("SCR_CHECKPOINT_OVERHEAD=10")
    scr.init()
    assert scr.need_checkpoint(), "the first one, to learn what it costs"
    write("one", {"f": b"x"})
    pace = scr._program.pace  # type: ignore[union-attr]
    pace._cost_seconds, pace._last_end = 1.0, time.monotonic()
    assert not scr.need_checkpoint()
    pace._last_end -= 8.9
    assert not scr.need_checkpoint()
    pace._last_end -= 0.2
    assert scr.need_checkpoint()


def test_halting(place: Path) -> None:
    scr.config("SCR_CHECKPOINT_INTERVAL=100")
    scr.init()
    halt = Prefix(place).change_halt
    assert not scr.should_exit()
    halt(lambda _: Halt(checkpoints_left=2))
    write("one", {"f": b"x"})
    assert not scr.should_exit()
    write("two", {"f": b"x"})
    assert scr.should_exit()
    assert scr.need_checkpoint(), "a last one"
    for condition in (Halt(reason="X"), Halt(exit_after=1.0), Halt(exit_before=time.time() + 50, seconds=60)):
        halt(lambda _, condition=condition: condition)
        assert scr.should_exit()
    halt(lambda _: Halt(exit_before=time.time() + 500))
    assert not scr.should_exit()
    scr.finalize()
    assert Prefix(place).halt().reason == "FINALIZE_CALLED"
    scr.init()
    assert not scr.should_exit(), "another start is another job"


def test_permissions_and_times_of_files_come_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(path: str) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_mode & 0o777, found.st_mtime_ns

    for wanted, setting in ((True, "1"), (False, "0")):
        monkeypatch.setenv("SCR_COPY_METADATA", setting)
        monkeypatch.setenv("SCR_FLUSH", "1")
        scr.init()
        scr.start_output(f"c{setting}", scr.FLAG_CHECKPOINT)
        routed = scr.route_file(f"c{setting}/secret")
        Path(routed).write_bytes(b"x" * 100)
        os.chmod(routed, 0o700)
        os.utime(routed, ns=(10**18, 10**18))
        assert scr.complete_output()
        scr.finalize()
        assert (facts(f"c{setting}/secret") == (0o700, 10**18)) == wanted
        os.rename(place / "cache", place / f"gone.{setting}")
        scr.init()
        assert scr.have_restart() == scr.start_restart() == f"c{setting}"
        assert (facts(scr.route_file(f"c{setting}/secret")) == (0o700, 10**18)) == wanted
        scr.complete_restart()
        scr.finalize()


def test_a_file_is_known_by_the_last_part_of_its_path(place: Path) -> None:
    """As in SCR, whose older programs give nothing else in a restart."""
    scr.init()
    write("c1", {"c1/model": b"m", "c1/a/part": b"a", "c1/b/part": b"b"})
    assert scr.have_restart() == scr.start_restart() == "c1"
    assert read("model", "/elsewhere/model", "c1/a/part") == [b"m", b"m", b"a"]
    with pytest.raises(RuntimeError, match=r"not in 'c1'"):
        scr.route_file("part")
    scr.complete_restart()


def test_a_dataset_without_a_name_gets_scrs(place: Path) -> None:
    scr.init()
    assert write("", {"f": b"1"}) and write("", {"f": b"2"})
    assert scr.have_restart() == "scr.dataset.2"


def test_what_is_newer_is_dropped_with_current(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.config("SCR_DROP_AFTER_CURRENT=1")
    scr.init()
    for number in range(1, 4):
        write(f"c{number}", {f"c{number}/f": b"%d" % number})
    scr.current("c1")
    assert scr.have_restart() is None, "it was loaded already"
    scr.finalize()
    assert command("index", place).count("dropped") == 2
    scr.init()
    assert scr.have_restart() == "c1"


def test_debug_shows_parameters_and_the_user_is_in_the_cache(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("stepwell")
    before = logger.level, list(logger.handlers)
    try:
        scr.config("SCR_DEBUG=1")
        scr.config("SCR_USER_NAME=some/one")
        scr.init()
        assert "SCR_FLUSH=10" in caplog.text and "SCR_DEBUG=1" in caplog.text
        assert (place / "cache" / "some_one" / "stepwell-scr" / "runs").is_dir()
    finally:
        logger.setLevel(before[0])
        logger.handlers[:] = before[1]


def test_prove_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_PROVE", "x")
    with pytest.raises(RuntimeError, match="`stepwell prove` compares states of a Checkpointer"):
        scr.init()


# -- parameters -------------------------------------------------------------------------------------------------------


def test_precedence(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = tmp_path / "system.conf"
    monkeypatch.setattr("stepwell.adapters.scr.parameter_sources.SYSTEM_FILE", system)
    config = Config()

    def flush() -> str | None:
        found = config.tell("SCR_FLUSH", may_set=False)
        assert settle(config).flush == int(found or 10)
        return found

    assert flush() is None, "a default is not told"
    system.write_text("# comment\n\nSCR_FLUSH=1\n")
    assert flush() == "1"
    config.tell("SCR_FLUSH=2", may_set=True)
    assert flush() == "2"
    (place / ".scrconf").write_text("SCR_FLUSH=3  # ours\n")
    assert flush() == "3"
    monkeypatch.setenv("SCR_FLUSH", "4")
    assert flush() == "4"
    monkeypatch.delenv("SCR_FLUSH")
    (place / ".scrconf").unlink()
    config.tell("SCR_FLUSH=", may_set=True)
    assert flush() == "1"


def told(*lines: str) -> Settings:
    config = Config()
    for line in lines:
        config.tell(line, may_set=True)
    return settle(config)


def test_what_parameters_mean(place: Path) -> None:
    assert told().scheme(1) == Xor(8)
    assert told("SCR_COPY_TYPE=SINGLE").scheme(7) == Single()
    assert told("SCR_COPY_TYPE=PARTNER").scheme(7) == Partner()
    assert told("SCR_COPY_TYPE=RS", "SCR_SET_SIZE=6", "SCR_SET_FAILURES=3").scheme(1) == ReedSolomon(6, 3)
    file = told("SCR_COPY_TYPE=FILE", "CKPT=0 INTERVAL=1 TYPE=SINGLE", "CKPT=1 INTERVAL=4 TYPE=XOR SET_SIZE=4")
    assert [file.scheme(number) for number in (1, 2, 4, 6, 8)] == [Single(), Single(), Xor(4), Single(), Xor(4)]
    assert told("SCR_FLUSH_ASYNC_BW=200MB").bytes_per_second == 200 << 20
    host = socket.gethostname()
    assert told().domain is None
    assert told("SCR_GROUP=POWER", f"GROUPS={host} POWER=psu1 SWITCH=3").domain == "POWER=psu1"
    with pytest.raises(ConfigError, match="GROUPS="):
        told("SCR_GROUP=POWER")
    for line in ("SCR_FLUSH=x", "SCR_FLUSH=-1", "SCR_FLUSH=1.5", "SCR_COPY_TYPE=RAID", "SCR_COPY_TYPE=FILE"):
        with pytest.raises(ConfigError, match=line.split("=")[0]):
            told(line)
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        told("SCR_FLUSH 3=")


def test_what_has_no_effect_is_named(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every name that SCR's sources read is honoured or has a reason; so have descriptors, and any other name."""
    ignored = told("SCR_CRC_ON_FLUSH=0", "SCR_RUNS=3", "SCR_NONSENSE=1", "SCR_LOG_DB_PASS=secret", "FOO=1").ignored
    assert ignored.keys() == {"SCR_CRC_ON_FLUSH", "SCR_RUNS", "SCR_NONSENSE", "SCR_LOG_DB_PASS", "FOO"}
    assert "secret" not in str(ignored) and ignored["FOO"] == "not a parameter of this interface"
    reading = """DEBUG COPY_METADATA DROP_AFTER_CURRENT FLUSH_POSTSTAGE JOB_ID JOB_NAME USER_NAME CLUSTER_NAME
        CHECKPOINT_PATTERN LOG_ENABLE LOG_DB_HOST AXL_MKDIR NODE_TESTS PREFIX_PURGE HALT_EXIT ENABLE"""
    for name in reading.split():
        assert told(f"SCR_{name}=1").ignored.get(f"SCR_{name}") != "not a parameter of this interface"
    cache = os.environ["SCR_CACHE_BASE"]
    lines = told(
        "SCR_COPY_TYPE=FILE",
        f"STORE={cache} GROUP=NODE COUNT=2",
        "STORE=/ssd GROUP=NODE COUNT=3",
        f"CKPT=0 INTERVAL=1 GROUP=NODE STORE={cache} TYPE=XOR SET_SIZE=16",
        "CKPT=1 INTERVAL=4 GROUP=WORLD STORE=/ssd TYPE=XOR BYPASS=1",
        "CKPT=2 INTERVAL=5 TYPE=SINGLE ENABLED=0",
    )
    assert list(lines.ignored) == [
        f"STORE={cache} GROUP=NODE COUNT=2",
        "STORE=/ssd GROUP=NODE COUNT=3",
        "CKPT=1 BYPASS=1",
        "CKPT=1 GROUP=WORLD",
        "CKPT=1 STORE=/ssd",
    ]
    assert lines.scheme(5) == Xor(16), "the third one is not enabled"
    assert "CKPT=" in told("CKPT=0 INTERVAL=1 TYPE=XOR").ignored
    scr.config("SCR_JOB_ID=7")
    scr.config(f"SCR_CONF_FILE={place}/gone.conf")
    scr.init()
    assert "SCR_JOB_ID has no effect: a cache belongs to the run in the prefix" in caplog.text
    assert f"SCR_CONF_FILE has no effect: {place}/gone.conf is not a file" in caplog.text


def test_a_bucket_or_a_variable_that_is_not_set_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("SCR_PREFIX=s3://x", "SCR_CACHE_BASE=s3://x/y"):
        monkeypatch.delenv(line.partition("=")[0], raising=False)
        with pytest.raises(ConfigError, match=r"s3://x.*not support buckets"):
            told(line)
    for value in ("${TMPD}", "$TMPD/x", "${TMPD", "/a/${B>}"):
        with pytest.raises(ConfigError, match="SCR_CACHE_BASE="):
            told(f"SCR_CACHE_BASE={value}")
    monkeypatch.setenv("TMPD", str(place))
    for value in ("${TMPD}/deep", "$TMPD/deep"):
        assert told(f"SCR_CACHE_BASE={value}").cache.parents[1] == place / "deep"
        monkeypatch.setenv("SCR_CACHE_BASE", value)
        assert told().cache.parents[1] == place / "deep"
        monkeypatch.delenv("SCR_CACHE_BASE")


def test_it_can_be_switched_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scr.config("SCR_ENABLE=0")
    with pytest.raises(RuntimeError, match="SCR_ENABLE=0"):
        scr.init()
    assert list(place.iterdir()) == []
    scr.config("SCR_ENABLE=")
    monkeypatch.setenv("SCR_ENABLE", "0")
    with pytest.raises(RuntimeError, match="SCR_ENABLE=0"):
        scr.init()


# What SCR's own test of its configuration checks, in our words. Each line: what is told; a question; its answer.
SENTENCES = """
|DEBUG|-
DEBUG=1|DEBUG|1
DEBUG =2|DEBUG|2
DEBUG= 3|DEBUG|3
DEBUG  = 4|DEBUG|4
SCR_COPY_TYPE =SINGLE|SCR_COPY_TYPE|SINGLE
STORE= /dev/shm/foo GROUP = NODE COUNT  =1|STORE= /dev/shm/foo COUNT|1
|STORE|/dev/shm/foo
|STORE=/dev/shm/foo GROUP|NODE
CKPT=0 INTERNAL=1 GROUP=NODE STORE=/dev/shm TYPE=XOR SET_SIZE=16|CKPT=0 SET_SIZE|16
|FOOBAR|-
|CKPT=1 FOOBAR|-
DEBUG=0|DEBUG|0
STORE=/dev/shm GROUP=NODE COUNT=1|STORE=/dev/shm COUNT|1
|STORE|-
STORE=|STORE|-
SCR_DB_NAME=one|SCR_DB_NAME|one
SCR_CACHE_BASE=/dev/shm/name|SCR_CACHE_BASE|/dev/shm/name
SCR_CACHE_BASE==/dev/=shm|SCR_CACHE_BASE|=/dev/=shm
SCR_CACHE_BASE= =/dev/==shm=|SCR_CACHE_BASE|=/dev/==shm=
"""
EXPANDED = """
$VAR_A|value a
${VAR_A}|value a
${VAR_A|${VAR_A
${VAR_A}>|value a>
$VAR_A>|value a>
:$VAR_A ${VAR_B}:|:value a value b:
$VAR_A ${VAR_B>}|value a ${VAR_B>}
$VAR_C|
"""


def test_config_understands_what_scr_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCR_CACHE_BASE")
    assert scr.config("") is None and scr.config(None) is None
    for said, question, answer in (line.split("|") for line in SENTENCES.strip().splitlines()):
        assert not said or scr.config(said) is None, said
        assert scr.config(question) == (None if answer == "-" else answer), (said, question)
    monkeypatch.setenv("SCR_DB_NAME", "two")
    assert scr.config("SCR_DB_NAME") == "two", "the environment goes first"
    monkeypatch.setenv("VAR_A", "value a")
    monkeypatch.setenv("VAR_B", "value b")
    for text, expected in (line.split("|") for line in EXPANDED.strip().splitlines()):
        monkeypatch.setenv("ANY", text)
        assert scr.config("ANY") == expected
    for wrong in (" ", "KEY VALUE", "=x", "CKPT=0 TYPE=XOR SET_SIZE", "CKPT=0 TYPE="):
        with pytest.raises(RuntimeError):
            scr.config(wrong)


def test_what_was_told_ends_with_the_job(place: Path) -> None:
    scr.config("SCR_FLUSH=3")
    scr.init()
    assert scr.config("SCR_FLUSH") == "3"
    scr.finalize()
    assert scr.config("SCR_FLUSH") is None


def test_files_of_parameters(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SCR's own templates are: lists of directories, words in front of a value, names in small letters."""
    monkeypatch.delenv("SCR_PREFIX")
    monkeypatch.delenv("SCR_CACHE_BASE")
    file = place / "scr.conf"
    lines = ["# all of it", "CNTLDIR=/dev/shm BYTES=1GB", "CACHEDIR=/ssd     BYTES=270GB", "", "scr_flush = 7 # often"]
    lines += [f"SCR_PREFIX={place}/elsewhere", "SCR_DB_PASS=12345", "STORE=/dev/shm GROUP=NODE COUNT=2"]
    file.write_text("\n".join([*lines, "SCR_FLUSH=8", ""]))
    config = Config()
    config.tell(f"SCR_CONF_FILE={file}", may_set=True)
    config.tell("SCR_PREFIX=.", may_set=True)
    assert config.tell("SCR_PREFIX", may_set=False) == f"{place}/elsewhere", "the user's file goes first"
    assert config.tell("SCR_FLUSH", may_set=False) is None, "it is there twice"
    found = settle(config)
    assert (found.flush, found.prefix) == (7, place / "elsewhere")
    assert {"CNTLDIR=", "CACHEDIR=", "SCR_DB_PASS", "STORE=/dev/shm GROUP=NODE COUNT=2"} == set(found.ignored)
    config.tell("SCR_CONF_FILE=", may_set=True)
    assert config.tell("SCR_FLUSH", may_set=False) is None and settle(config).flush == 10
    file.write_text("SCR_FLUSH 3\n")
    config.tell(f"SCR_CONF_FILE={file}", may_set=True)
    with pytest.raises(ConfigError, match=r"scr.conf, line 1"):
        settle(config)


def test_every_parameter_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scr.md").read_text()
    missing = [name for name in (*HONOURED, *IGNORED) if name.removeprefix("SCR_") not in page]
    assert not missing


# -- commands ---------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> str:
    from click.testing import CliRunner

    result = CliRunner().invoke(main, [str(part) for part in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_index_and_halt_by_command(place: Path) -> None:
    scr.config("SCR_FLUSH=1")
    scr.init()
    for number in range(3):
        write(f"c{number}", {f"c{number}/f": b"x"})
    scr.finalize()
    assert "c2" in command("index", place) and "current" in command("index", place)
    command("index", place, "--current", "c1")
    scr.init()
    assert scr.have_restart() == "c1"
    scr.finalize()
    command("index", place, "--current", "c2")
    command("index", "--prefix", place, "--drop-after", "c1", "--list")
    command("index", place, "--delete", "c0")
    assert not (place / "c0").exists()
    scr.init()
    assert scr.have_restart() == "c1"
    command("halt", place, "--checkpoints", 1, "--before", "2099-01-01T00:00")
    assert not scr.should_exit()
    command("halt", place, "--immediate")
    assert scr.should_exit()
    command("halt", place, "--unset-reason")
    assert not scr.should_exit()
    shown = command("halt", place, "--unset-checkpoints", "--unset-before", "-l")
    assert "nothing: the job continues" in shown
    command("halt", place, "-i", "--seconds", 5, "--after", 1)
    assert "nothing" in command("halt", place, "--unset-seconds", "--unset-after", "--unset-reason")
    command("halt", place, "--immediate")
    command("halt", place, "--remove")
    assert not scr.should_exit()
    command("verify", place / ".stepwell-scr")


def test_scavenge_after_the_last_run(place: Path) -> None:
    scr.config("SCR_FLUSH=0")
    scr.init()
    for number in range(3):
        write(f"c{number}", {f"c{number}/f": b"%d" % number})
    scr.finalize()
    assert "c2" in command("scavenge", place, place / "cache", "--dry-run")
    assert not (place / "c2").exists()
    assert "copied  c2" in command("scavenge", place, place / "cache")
    assert (place / "c2" / "f").read_bytes() == b"2"
    assert "nothing to copy" in command("scavenge", place, place / "cache")
    assert "copied  c1" in command("scavenge", place, place / "cache", "--all")
    end()
