"""The search for threads and write size: on made-up disks; and what is remembered of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.agent.files.tuning import Setting, Tuner, WritePlace, most_threads, recall, remember
from stepwell.handover.protocol import Durable
from stepwell.storage.store.mounts import file_system_type
from tests.agent.puppet import Puppet

MIB = 1 << 20
Disk = Callable[[Setting], float]


def write(tuner: Tuner, disk: Disk, nbytes: int) -> list[tuple[Setting, int]]:
    """As the writer does it. Returns how the segments were written."""
    done, left = [], nbytes
    while left:
        setting, part = tuner.plan(left)
        assert 0 < part <= left and (part == left or part % (16 * MIB) == 0)
        tuner.note(setting, part, part / disk(setting))
        done.append((setting, part))
        left -= part
    return done


def many_threads(setting: Setting) -> float:
    """An array: each thread adds, up to a limit."""
    return min(3.7e9, setting.threads * 0.5e9)


def large_writes(setting: Setting) -> float:
    """Each write costs, however large it is."""
    return 1.3e9 if setting.write_bytes == 16 * MIB else 1e9


def few_threads(setting: Setting) -> float:
    """A disk that seeks."""
    return 0.2e9 / setting.threads


@pytest.mark.parametrize(
    ("disk", "threads", "size"), [(many_threads, 8, 4), (few_threads, 1, 4), (large_writes, 4, 16)]
)
@pytest.mark.parametrize("nbytes", [10_000_000_000, 1_200_000_000, 100_000_000])
def test_the_best_is_found(disk: Disk, threads: int, size: int, nbytes: int) -> None:
    tuner, saves = Tuner(16), 0
    while tuner.is_searching:
        write(tuner, disk, nbytes)
        saves += 1
    assert tuner.setting == Setting(threads, size * MIB) and tuner.news
    assert tuner.rate == pytest.approx(disk(tuner.setting))
    assert saves <= (1 if nbytes > 5e9 else 4 if nbytes > 1e9 else 16)
    assert write(tuner, disk, nbytes) == [(tuner.setting, nbytes)]


def test_noise_costs_little() -> None:
    draw = random.Random(1)
    poor = 0
    for _ in range(50):
        tuner = Tuner(16)
        while tuner.is_searching:
            write(tuner, lambda setting: many_threads(setting) * draw.uniform(0.7, 1.0), 1_200_000_000)
        poor += many_threads(tuner.setting) < 0.8 * 3.7e9
    assert poor <= 5


def test_never_more_threads_than_allowed() -> None:
    tuner, seen = Tuner(4), set()
    while tuner.is_searching:
        seen |= {setting.threads for setting, _ in write(tuner, many_threads, 1_200_000_000)}
    assert seen <= {1, 2, 4}
    assert Tuner().plan(1)[0].threads <= most_threads()


def test_small_writes_say_nothing() -> None:
    tuner = Tuner(16)
    before = tuner.setting
    for _ in range(100):
        write(tuner, many_threads, 1_000_000)
    assert tuner.is_searching and tuner.setting == before and not tuner.rate


def test_a_disk_that_became_slow_is_looked_at_again() -> None:
    tuner = Tuner(16)
    while tuner.is_searching:
        write(tuner, many_threads, 10_000_000_000)
    tuner.news = ""
    for _ in range(2):
        write(tuner, few_threads, 10_000_000_000)
    write(tuner, many_threads, 10_000_000_000)  # it was only busy
    for _ in range(2):
        write(tuner, few_threads, 10_000_000_000)
    assert not tuner.is_searching
    write(tuner, few_threads, 10_000_000_000)
    assert tuner.is_searching
    while tuner.is_searching:
        write(tuner, few_threads, 10_000_000_000)
    assert tuner.setting.threads == 1 and "half" in tuner.news


# -- what is remembered


HERE = WritePlace("host", "ext4", 77)
FOUND = Setting(2, 16 * MIB)


def test_it_is_recalled_on_the_same_file_system_only(tmp_path: Path) -> None:
    path = tmp_path / "storage.json"
    assert recall(path, HERE) is None
    remember(path, HERE, FOUND, 2.5e9)
    assert recall(path, HERE) == (FOUND, 2.5e9)
    for other in (replace(HERE, host="x"), replace(HERE, file_system="xfs"), replace(HERE, id=78)):
        assert recall(path, other) is None


def test_damage_and_nonsense_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "storage.json"
    remember(path, HERE, FOUND, 2.5e9)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert recall(path, HERE) is None
    for setting, rate in ((Setting(0, MIB), 1e9), (Setting(9999, MIB), 1e9), (Setting(1, 12345), 1e9), (FOUND, 0.0)):
        remember(path, HERE, setting, rate)
        assert recall(path, HERE) is None
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert recall(path, HERE) is None
    path.unlink()
    path.mkdir()
    assert recall(path, HERE) is None


def test_the_type_of_a_file_system(tmp_path: Path) -> None:
    assert file_system_type(Path("/proc")) == "proc"
    assert file_system_type(tmp_path / "not there") not in ("?", "proc")


def test_an_agent_remembers_and_the_next_one_knows(run_dir: Path) -> None:
    puppet = Puppet(run_dir, leaf_bytes=40 * MIB)
    puppet.start()
    for step in range(1, 20):
        assert isinstance(puppet.save(step), Durable)
        if puppet.events("storage"):
            break
    assert puppet.close()
    (event,) = puppet.events("storage")
    known = recall(puppet.paths.storage, WritePlace.of(run_dir))
    assert known is not None and vars(known[0]).items() <= event.items()
    again = Puppet(run_dir, leaf_bytes=40 * MIB)
    again.start(parent=1, step=step)
    for later in range(step + 1, step + 3):
        assert isinstance(again.save(later), Durable)
    assert again.close()
    assert len(again.events("storage")) == 1
