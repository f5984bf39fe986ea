"""Messages between trainer and agent: whole or not there, with descriptors."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from stepwell.handover.channel import Channel
from stepwell.handover.message import MessageError, encode
from stepwell.handover.protocol import BaseWanted, Bye, NewArena, NoPart, Pong

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    made = Channel(left), Channel(right)
    yield made
    for end in made:
        end.close()


def test_messages_arrive_in_order_and_whole(ends: Ends) -> None:
    messages = [NoPart(i, 0, "x" * i) for i in range(50)]
    for message in messages:
        ends[0].send(message)
    assert [ends[1].receive() for _ in messages] == [(message, []) for message in messages]


def test_a_message_larger_than_the_socket_buffer(ends: Ends) -> None:
    big = BaseWanted("y" * (8 << 20))
    sender = threading.Thread(target=ends[0].send, args=(big,))
    sender.start()
    received = ends[1].receive()
    sender.join()
    assert received is not None and received[0] == big


def test_descriptors_travel_with_a_message(ends: Ends) -> None:
    fd = os.memfd_create("x")
    os.write(fd, b"shared")
    ends[0].send(NewArena(1, 2, 4096, 0), [fd])
    os.close(fd)
    received = ends[1].receive()
    assert received is not None
    (got,) = received[1]
    assert os.pread(got, 10, 0) == b"shared" and not os.get_inheritable(got)
    os.close(got)


def test_what_was_sent_before_the_end_still_arrives_and_half_a_message_does_not(ends: Ends) -> None:
    ends[0].send(Bye())
    body = encode(Pong()).encode()
    ends[0].socket.sendall(struct.pack("<Q", len(body)) + body[:5])
    ends[0].close()
    assert ends[1].receive() == (Bye(), [])
    assert ends[1].receive() is None


def test_a_forged_length_is_refused_before_anything_is_allocated(ends: Ends) -> None:
    ends[0].socket.sendall(struct.pack("<Q", 1 << 62))
    with pytest.raises(OSError, match="more than"):
        ends[1].receive()


def test_sending_to_a_closed_end_is_an_error_not_a_signal(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(OSError):
        for _ in range(100):
            ends[0].send(BaseWanted("z" * 100_000))


def test_the_message_after_one_that_cannot_be_understood_is_read(ends: Ends) -> None:
    body = b'{"type":"what"}'
    ends[0].socket.sendall(struct.pack("<Q", len(body)) + body)
    ends[0].send(Bye())
    with pytest.raises(MessageError, match="unknown type 'what'"):
        ends[1].receive()
    assert ends[1].receive() == (Bye(), [])
