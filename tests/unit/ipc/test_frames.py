"""Frames between two processes of one engine: whole, in order, bounded, and an end that is seen."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sessionkv.errors import ConnectionLost
from sessionkv.ipc.frames import FrameSocket, wait_for_end


@contextmanager
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ours, theirs = FrameSocket.pair()
    with ours, FrameSocket(theirs) as other:
        yield ours, other


def receive(end: FrameSocket, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += end.receive()
    return frames


def test_frames_come_whole_and_in_order_whatever_their_size() -> None:
    sizes = [0, 1, 3, 4, 5, 70_000, 2_000_000, 0, 262_140, 262_144, 262_150, 7]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    with ends() as (left, right):
        sender = threading.Thread(target=lambda: [left.send(frame) for frame in sent])
        sender.start()
        assert receive(right, len(sent)) == sent
        sender.join()


def test_both_ways_at_once() -> None:
    sent = [os.urandom(100_000) for _ in range(20)]
    with ends() as (left, right):
        got: list[list[bytes]] = []

        def talk(end: FrameSocket) -> None:
            reader = threading.Thread(target=lambda: got.append(receive(end, len(sent))))
            reader.start()
            for frame in sent:
                end.send(frame)
            reader.join()

        talkers = [threading.Thread(target=talk, args=(end,)) for end in (left, right)]
        for talker in talkers:
            talker.start()
        for talker in talkers:
            talker.join()
    assert got == [sent, sent]


def test_senders_of_many_threads_do_not_mix() -> None:
    with ends() as (left, right):
        threads = [
            threading.Thread(
                target=lambda n=n: [left.send(b"%d:%d:" % (n, i) * 500) for i in range(50)]
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        frames = receive(right, 200)
        for thread in threads:
            thread.join()
    for number in range(4):
        mine = [frame for frame in frames if frame.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d:" % (number, i) * 500 for i in range(50)]


def test_a_sender_waits_for_a_reader_that_is_behind() -> None:
    """What lies between the two is bounded; nothing is lost of it."""
    frame, sent, last = bytes(10_000), [], bytes(2_000_000)
    with ends() as (left, right):
        while left.send_if_free(frame):
            sent.append(frame)
        assert 0 < len(sent) * len(frame) < 2_000_000
        going_on = threading.Event()

        def one_more() -> None:
            left.send(last)  # more than any buffer holds
            going_on.set()

        thread = threading.Thread(target=one_more)
        thread.start()
        while not left._sending.locked():
            pass
        assert not left.send_if_free(b"beat")
        assert not going_on.is_set()
        assert receive(right, len(sent) + 1) == [*sent, last]
        thread.join()
        assert left.send_if_free(b"beat")
        assert receive(right, 1) == [b"beat"]


def test_what_is_posted_never_waits_and_goes_as_the_other_side_reads() -> None:
    sent = [b"a" * 10, bytes(2_000_000), b"", b"b" * 300_000]
    with ends() as (left, right):
        assert right.receive_now() == []
        left.post(sent[0])
        assert not left.is_behind
        assert right.receive_now() == sent[:1]
        for frame in sent[1:]:
            left.post(frame)
        assert left.is_behind
        assert not left.send_if_free(b"beat")
        assert 2_300_008 - 1_000_000 < left.num_unsent_bytes < 2_300_012
        got: list[bytes] = []
        while len(got) < 3:
            got += right.receive_now()
            left.flush()
        assert got == sent[1:]
        assert not left.is_behind
        assert left.num_unsent_bytes == 0
        left.post(bytes(2_000_000))
        right.close()
        with pytest.raises(ConnectionLost):
            left.flush()
        assert not left.is_behind
        assert left.num_unsent_bytes == 0


def test_a_descriptor_may_be_any_number() -> None:
    ours, theirs = socket.socketpair()
    # The first free one from there on, so that nobody else's is closed.
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024)
    ours.close()
    with FrameSocket(socket.socket(fileno=high)) as left, FrameSocket(theirs) as right:
        assert left.fd >= 1024
        assert left.send_if_free(b"beat")
        left.post(b"more")
        assert receive(right, 2) == [b"beat", b"more"]
        right.send(b"back")
        assert left.receive_now() == [b"back"]


def test_a_frame_that_is_sent_if_free_is_sent_whole_or_not_at_all() -> None:
    large = bytes(2_000_000)
    with ends() as (left, right):
        assert left.send_if_free(large)  # the kernel takes its beginning
        assert left.is_behind
        assert not left.send_if_free(b"beat")
        got: list[bytes] = []
        while not got:
            got += right.receive_now()
            left.flush()
        assert got == [large]
        assert left.send_if_free(b"beat")
        assert receive(right, 1) == [b"beat"]


def test_the_end_of_the_other_side_is_told_after_what_it_sent() -> None:
    left, theirs = FrameSocket.pair()
    with left, FrameSocket(theirs) as right:
        right.send(b"last")
        right.close()
        wait_for_end(left.fd)
        assert left.receive() == [b"last"]
        with pytest.raises(ConnectionLost):
            left.receive()
        with pytest.raises(ConnectionLost):
            left.send(b"x")


def test_half_a_frame_is_no_frame() -> None:
    left, theirs = FrameSocket.pair()
    with left:
        theirs.sendall(b"\x05\0\0\0abc")
        assert left.receive() == []
        theirs.sendall(b"de\x01")
        assert left.receive() == [b"abcde"]
        theirs.close()
        with pytest.raises(ConnectionLost):
            left.receive()


def test_a_waiting_sender_is_told_that_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair()
    failures: list[BaseException] = []
    with FrameSocket(ours) as left:

        def send() -> None:
            try:
                left.send(bytes(20_000_000))
            except ConnectionLost as error:
                failures.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        assert theirs.recv(1)
        theirs.close()
        thread.join()
    assert len(failures) == 1
