"""The file reader on stock DALI: any position of any epoch, with the same draws; through CFIterator, and killed."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.adapters.checkfreq import CFIterator, CFMode
from stepwell.adapters.dali import FileReader
from tests.adapters.scripts import Script
from tests.adapters.small import Small
from tests.crash.harness import Server

TRAIN = Path(__file__).parent / "train.py"
COUNT = 22
BATCH = 4
needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="nvidia.dali is not installed",
)


def make_pictures(root: Path, count: int) -> Path:
    """Three classes of small pictures; each picture's first pixel is its number."""
    for number in range(count):
        folder = root / f"class_{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        header, pixels = b"P6 8 8 255\n", bytes([number]) * (8 * 8 * 3)
        (folder / f"{number:03d}.ppm").write_bytes(header + pixels)
    (root / "class_0" / "notes.txt").write_text("no picture")
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures") / "train", COUNT)


def make_iterator(reader: FileReader) -> Any:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1)
    def pipeline() -> Any:
        files, labels, *draws = reader()
        return fn.decoders.image(files), labels, *draws

    names = ["data", "label", "draws"]
    return DALIGenericIterator(pipeline(), names[: 3 if reader._draws else 2])


def numbers(batch: Any) -> list[int]:
    return [int(value) for value in batch[0]["data"][:, 0, 0, 0]]


# -- without DALI: which samples come ---------------------------------------------------------------------------------


def test_each_epoch_is_a_permutation_of_its_own(pictures: Path) -> None:
    reader = FileReader(str(pictures))
    assert reader.epoch_size() == COUNT and reader.classes == ["class_0", "class_1", "class_2"]
    epochs = [reader.samples(epoch, 0, COUNT) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [FileReader(str(pictures)).samples(epoch, 0, COUNT) for epoch in range(3)] == epochs
    assert FileReader(str(pictures), seed=1).samples(0, 0, COUNT) != epochs[0]


def test_shards_share_an_epoch(pictures: Path) -> None:
    shards = [FileReader(str(pictures), shard_id=shard, num_shards=4) for shard in range(4)]
    assert sum(shard.epoch_size() for shard in shards) == COUNT
    assert sorted(sample for shard in shards for sample in shard.samples(5, 0, COUNT)) == list(range(COUNT))


def test_without_shuffling_they_come_as_they_lie(pictures: Path) -> None:
    assert FileReader(str(pictures), shuffle_after_epoch=False).samples(3, 2, 6) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either file_root= or files="),
        ({"files": ["a"], "shard_id": 2, "num_shards": 2}, "no such shard"),
        ({"files": ["a"], "draws": 17}, "at most 16 draws"),
        ({"files": ["a"], "resume_index": -1}, "numbers from 0 on"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(stepwell.ConfigError, match=message):
        FileReader(**options)


def test_a_wrong_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        stepwell.DataError, match=r"nowhere: No such file or directory; file_root= is a folder of classes"
    ):
        FileReader(str(tmp_path / "nowhere"))
    with pytest.raises(stepwell.DataError, match="contains no pictures"):
        FileReader(str(tmp_path))
    with pytest.raises(stepwell.DataError, match="1 files, 2 labels"):
        FileReader(files=["a"], labels=[1, 2])


def test_an_option_without_effect_is_said() -> None:
    with pytest.warns(UserWarning, match="cf_det=False has no effect"):
        FileReader(files=["a"], cf_det=False)


# -- with DALI --------------------------------------------------------------------------------------------------------


@needs_dali
def test_files_labels_and_draws_are_those_of_the_order(pictures: Path) -> None:
    reader = FileReader(str(pictures), draws=2)
    batches = make_iterator(reader)
    for epoch in range(2):
        seen = list(batches)
        batches.reset()
        order = reader.samples(epoch, 0, COUNT)
        files = sorted(pictures.rglob("*.ppm"))
        assert [number for batch in seen for number in numbers(batch)] == [int(files[i].stem) for i in order]
        assert [len(batch[0]["data"]) for batch in seen] == [4, 4, 4, 4, 4, 2]
        for batch in seen:
            assert batch[0]["label"].squeeze(1).tolist() == [number % 3 for number in numbers(batch)]
            assert batch[0]["draws"].shape == (len(numbers(batch)), 2) and bool((batch[0]["draws"] < 1).all())


@needs_dali
@pytest.mark.parametrize("index", [0, 4, 12, 20])
def test_a_reader_begins_at_any_position(pictures: Path, index: int) -> None:
    def rest(**position: int) -> list[tuple[list[int], list[list[float]]]]:
        batches = make_iterator(FileReader(str(pictures), draws=3, **position))
        found = []
        for _ in range(2):
            found += [(numbers(batch), batch[0]["draws"].tolist()) for batch in batches]
            batches.reset()
        return found

    whole = rest(resume_epoch=1)
    assert rest(resume_epoch=1, resume_index=index) == whole[index // BATCH :]
    assert rest(resume_epoch=0, resume_index=COUNT + 2) == whole, "nothing left of epoch 0 is the start of epoch 1"


@needs_dali
@pytest.mark.parametrize("stop", [3, 6], ids=["middle", "end"])
def test_cf_iterator_around_a_dali_iterator_resumes_at_the_next_sample(
    pictures: Path, run_dir: Path, stop: int
) -> None:
    def start(where: Path, **options: Any) -> tuple[Small, list[list[int]]]:
        small = Small(where, mode=CFMode.MANUAL, is_wrapped=False, **options)
        state = small.restored or {"start_index": 0, "epoch": 0}
        reader = FileReader(str(pictures), resume_index=state["start_index"], resume_epoch=state["epoch"], cf_det=True)
        small.iterator = CFIterator(make_iterator(reader), bs=BATCH, chk_freq=1, cf_manager=small.manager)
        small.iterator.load_state_dict(small.restored)
        return small, []

    def train(small: Small, seen: list[list[int]], epochs: int, batches: int = 99) -> list[list[int]]:
        while small.iterator.state_dict()["epoch"] < epochs:
            for batch in small.iterator:
                seen.append(numbers(batch))
                small.update(batch[0]["data"][:, 0, :, 0].float())
                if len(seen) == batches:
                    return seen
            small.iterator.reset()
        return seen

    uncut, seen = start(run_dir / "whole")
    whole = train(uncut, seen, epochs=3)
    uncut.manager.close()
    assert len(whole) == 18
    first, seen = start(run_dir / "cut")
    train(first, seen, epochs=1 if stop == 6 else 3, batches=99 if stop == 6 else stop)
    first.manager.close()
    second, rest = start(run_dir / "cut", restore="before")
    assert second.restored is not None
    done = second.restored["steps_so_far"]
    assert done == (6 if stop == 6 else 2), "the running iteration is not saved before the next request"
    assert second.restored["epoch"] == (1 if stop == 6 else 0)
    assert seen[:done] + train(second, rest, epochs=3) == whole
    second.manager.close()


@needs_dali
@pytest.mark.parametrize("mode", ["AUTO", "MANUAL"])
@pytest.mark.parametrize("agent_too", ["0", "1"], ids=["trainer", "trainer_and_agent"])
def test_five_steps_with_dali_killed_and_resumed(
    server: Server, run_dir: Path, tmp_path: Path, mode: str, agent_too: str
) -> None:
    root = make_pictures(tmp_path / "pictures", 42)
    settings = {"CF_DALI": str(root), "CF_MODE": mode, "CF_FREQ": "3", "CF_KILL_AGENT": agent_too}
    uncut = Script(server, tmp_path, str(TRAIN), str(tmp_path / "whole"))
    assert uncut.run(**settings) == 0, uncut.output
    cut = Script(server, run_dir.parent, str(TRAIN), str(run_dir))
    for kill in ("8", "11", "19"):  # in the middle of an epoch, and in its last step
        assert cut.run(**settings, CF_KILL=kill) == -signal.SIGKILL, cut.output
    assert cut.run(**settings) == 0, cut.output
    assert cut.last_line() == uncut.last_line()
    history = Path(f"{tmp_path / 'whole'}.ledger").read_text().splitlines()
    assert len(history) == 36
    assert list(dict.fromkeys(Path(f"{run_dir}.ledger").read_text().splitlines())) == history


@needs_dali
def test_the_example_with_dali_killed_and_resumed(server: Server, pictures: Path, run_dir: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "image_classification.py")
    flags = f"--data {pictures.parent} -a small -b {BATCH} -j 1 --epochs 2 --deterministic --device cpu --noeval --dali"
    command = [example, *flags.split(), "--image-size", "8", "-p", "1", "--resume"]
    command += ["--chk_mode_baseline", "--chk-freq", "1", "--chk-prefix"]

    def losses(script: Script) -> list[str]:
        return [line.split(", ")[1] for line in script.output.splitlines() if line.startswith("epoch ")]

    uncut = Script(server, run_dir.parent, *command, str(run_dir.with_name("whole")))
    assert uncut.run() == 0, uncut.output
    whole = losses(uncut)
    assert len(whole) == 12
    cut = Script(server, pictures.parent, *command, str(run_dir))
    assert cut.run(STEPWELL_CRASH="trainer!copy.complete:0:9") == -signal.SIGKILL, cut.output
    assert losses(cut) == whole[:8], "killed in the save of step 9, before its line was printed"
    assert cut.run() == 0, cut.output
    assert losses(cut) == whole[9:]
