"""SCR's interface in one process: files that come back, parameters, the index, halting, and what goes when."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch

from stepwell.adapters import scr
from stepwell.adapters.scr.index import Halt, Prefix
from stepwell.adapters.scr.parameters import HONOURED, IGNORED, Config
from stepwell.cli.main import main
from stepwell.errors import ConfigError
from stepwell.levels.spec import Partner, ReedSolomon, Single, Xor
from stepwell.store.lineage import create_next
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
    for name, flags in [("", 1), ("a\nb", 1), ("x", 4), ("x", -1), ("x" * 2000, 1)]:
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
    monkeypatch.setattr("stepwell.adapters.scr.nodes.check_document", lambda path: None)
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


def test_current_drop_and_delete(place: Path) -> None:
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
    with pytest.raises(RuntimeError, match="no dataset of this name"):
        scr.delete("c3")
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


# -- parameters -------------------------------------------------------------------------------------------------------


def test_precedence(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = tmp_path / "system.conf"
    monkeypatch.setattr("stepwell.adapters.scr.parameters.SYSTEM_FILE", system)
    config = Config()

    def flush() -> str | None:
        assert config.tell("SCR_FLUSH", may_set=False) == str(config.settle().flush)
        return config.tell("SCR_FLUSH", may_set=False)

    assert flush() == "10"
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


def test_what_parameters_mean(place: Path) -> None:
    def settle(*lines: str):  # type: ignore[no-untyped-def]
        config = Config()
        for line in lines:
            config.tell(line, may_set=True)
        return config.settle()

    assert settle().scheme(1) == Xor(8)
    assert settle("SCR_COPY_TYPE=SINGLE").scheme(7) == Single()
    assert settle("SCR_COPY_TYPE=PARTNER").scheme(7) == Partner()
    assert settle("SCR_COPY_TYPE=RS", "SCR_SET_SIZE=6", "SCR_SET_FAILURES=3").scheme(1) == ReedSolomon(6, 3)
    file = settle("SCR_COPY_TYPE=FILE", "CKPT=0 INTERVAL=1 TYPE=SINGLE", "CKPT=1 INTERVAL=4 TYPE=XOR SET_SIZE=4")
    assert [file.scheme(number) for number in (1, 2, 4, 6, 8)] == [Single(), Single(), Xor(4), Single(), Xor(4)]
    assert settle("SCR_FLUSH_ASYNC_BW=200MB").bytes_per_second == 200 << 20
    assert settle("SCR_CRC_ON_FLUSH=0", "SCR_RUNS=3", "SCR_NONSENSE=1").ignored.keys() == {
        "SCR_CRC_ON_FLUSH",
        "SCR_NONSENSE",
    }
    host = socket.gethostname()
    assert settle().domain is None
    assert settle("SCR_GROUP=POWER", f"GROUPS={host} POWER=psu1 SWITCH=3").domain == "POWER=psu1"
    with pytest.raises(ConfigError, match="GROUPS="):
        settle("SCR_GROUP=POWER")
    for line in ("SCR_FLUSH=x", "SCR_FLUSH=-1", "SCR_FLUSH=1.5", "SCR_COPY_TYPE=RAID", "SCR_COPY_TYPE=FILE"):
        with pytest.raises(ConfigError, match=line.split("=")[0]):
            settle(line)
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        settle("SCR_FLUSH 3=")


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
    command("index", place, "--drop", "c2")
    command("index", place, "--delete", "c0")
    assert not (place / "c0").exists()
    scr.init()
    assert scr.have_restart() == "c1"
    command("halt", place, "--checkpoints", 1, "--before", "2099-01-01T00:00")
    assert not scr.should_exit()
    command("halt", place, "--immediate")
    assert scr.should_exit()
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
    assert "carried  c2" in command("scavenge", place, place / "cache")
    assert (place / "c2" / "f").read_bytes() == b"2"
    assert "nothing to carry" in command("scavenge", place, place / "cache")
    assert "carried  c1" in command("scavenge", place, place / "cache", "--all")
    end()
