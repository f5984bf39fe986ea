"""The arena: layout, what makes a slot complete, and memory that is shared by descriptor and by nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from stepwell.handover.memory import (
    FROZEN,
    HEADER_BYTES,
    MAX_SLOTS,
    PAGE,
    Arena,
    ArenaShape,
    available_bytes,
    whole_pages,
)

SHAPE = ArenaShape(generation=1, slots=2, slot_bytes=2 * PAGE, frozen_bytes=PAGE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.allocate(SHAPE)
    yield made
    made.close()


def test_slots_do_not_overlap_and_start_on_pages(arena: Arena) -> None:
    spans = [(arena.shape.start(index), size) for index, size in ((0, 2 * PAGE), (1, 2 * PAGE), (FROZEN, PAGE))]
    position = HEADER_BYTES
    for start, size in spans:
        assert start == position and start % PAGE == 0
        position += size
    assert position == SHAPE.nbytes
    for index, byte in ((0, 1), (1, 2), (FROZEN, 3)):
        image = arena.image(index, PAGE)
        image[:] = bytes([byte]) * PAGE
        image.release()
    assert [bytes(arena.image(index, PAGE)) == bytes([byte]) * PAGE for index, byte in ((0, 1), (1, 2), (FROZEN, 3))]
    assert (FROZEN + 1) * 64 <= HEADER_BYTES and FROZEN == MAX_SLOTS


def test_a_slot_is_complete_only_with_bytes_and_a_good_verdict(arena: Arena) -> None:
    assert not arena.is_complete(0, 7)
    arena.set_sequence(0, 7)
    assert not arena.is_complete(0, 7), "no verdict yet"
    arena.set_verdict(0, 7, is_good=False)
    assert not arena.is_complete(0, 7) and arena.is_void(0, 7)
    arena.set_verdict(0, 7, is_good=True)
    assert arena.is_complete(0, 7) and not arena.is_complete(0, 8) and not arena.is_complete(1, 7)
    arena.set_suspects(0, 2, 5)
    assert (arena.suspects(0).leaves, arena.suspects(0).first) == (2, 5)
    arena.claim(0)
    assert not arena.is_complete(0, 7) and arena.suspects(0).leaves == 0


def test_a_verdict_alone_does_not_complete_a_slot(arena: Arena) -> None:
    arena.set_verdict(1, 9, is_good=True)
    assert not arena.is_complete(1, 9)


def test_the_other_end_sees_the_same_memory(arena: Arena) -> None:
    other = Arena.attach(os.dup(arena.fd), SHAPE)
    arena.image(1, 5)[:] = b"hello"
    arena.set_sequence(1, 3)
    arena.set_verdict(1, 3, is_good=True)
    assert bytes(other.image(1, 5)) == b"hello" and other.is_complete(1, 3)
    other.close()


def test_a_descriptor_that_is_too_small_is_refused(arena: Arena) -> None:
    with pytest.raises(OSError, match="expected"):
        Arena.attach(arena.fd, ArenaShape(1, 9, 1 << 20, 0))


def test_memory_is_reserved_up_front_and_has_no_name(arena: Arena) -> None:
    """Reserved: a full machine is an error in allocate, never a bus error later. No name: nothing to leak."""
    assert os.fstat(arena.fd).st_blocks * 512 >= SHAPE.nbytes
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:stepwell-arena")
    assert not os.get_inheritable(arena.fd)


def mapped() -> int:
    """Arenas of this process, those that an earlier test left included."""
    return Path("/proc/self/maps").read_text().count("memfd:stepwell-arena")


def test_forked_children_do_not_get_it(arena: Arena) -> None:
    assert mapped() > 0
    pid = os.fork()
    if pid == 0:
        os._exit(mapped())
    assert os.waitpid(pid, 0)[1] == 0


def test_it_is_gone_when_closed_even_with_a_view_left() -> None:
    before = mapped()
    arena = Arena.allocate(SHAPE)
    view = arena.image(0, 10)
    arena.close()
    view.release()
    del arena, view
    assert mapped() == before


def test_more_than_there_is_is_an_error_and_is_not_even_tried() -> None:
    """The kernel takes page after page of a memfd and then kills processes: it must not be asked."""
    with mock.patch.object(os, "posix_fallocate") as reserve, pytest.raises(OSError, match="Cannot allocate memory"):
        Arena.allocate(ArenaShape(1, 1, 1 << 60, 0))
    reserve.assert_not_called()


def test_what_is_available_is_plausible() -> None:
    with open("/proc/meminfo") as file:
        total = int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < available_bytes() <= total


def test_whole_pages() -> None:
    assert [whole_pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
