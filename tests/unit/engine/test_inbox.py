"""One reader sleeps until a thread puts or its source can be read, and sleeps over neither."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sessionkv.engine.inbox import Inbox
from sessionkv.errors import ConnectionLost

LONG_S = 60.0


class Pipe:
    """A source of single bytes."""

    def __init__(self) -> None:
        self.fd, self.end = os.pipe()
        os.set_blocking(self.fd, False)
        self.kept: list[object] = []

    def take(self) -> list[object]:
        taken, self.kept = self.kept, []
        if taken:
            return taken
        try:
            data = os.read(self.fd, 100)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionLost("the end")
        return list(data)


@contextmanager
def fed() -> Iterator[tuple[Inbox[object], Pipe]]:
    inbox, pipe = Inbox[object](), Pipe()
    inbox.read_from(pipe)
    yield inbox, pipe
    inbox.close()
    os.close(pipe.fd)


@contextmanager
def when_asleep(inbox: Inbox[object], action: object) -> Iterator[None]:
    """Does it in another thread once the reader sleeps."""

    def late() -> None:
        while not inbox._asleep:
            pass
        action()  # type: ignore[operator]

    thread = threading.Thread(target=late)
    thread.start()
    yield
    thread.join()


def test_items_come_in_order_and_all_at_once() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.drain() == []
    assert inbox.drain(0.001) == []
    for number in range(5):
        inbox.put(number)
    assert inbox.drain(LONG_S) == [0, 1, 2, 3, 4]
    inbox.put(5)
    assert inbox.drain() == [5]
    inbox.close()
    inbox.put(6)


def test_a_sleeping_reader_is_woken_by_a_thread() -> None:
    with fed() as (inbox, _), when_asleep(inbox, lambda: inbox.put("a")):
        assert inbox.drain(LONG_S) == ["a"]


def test_a_sleeping_reader_is_woken_by_its_source() -> None:
    with fed() as (inbox, pipe), when_asleep(inbox, lambda: os.write(pipe.end, b"\7\x08")):
        assert inbox.drain(LONG_S) == [7, 8]
        os.close(pipe.end)


def test_nobody_writes_to_wake_a_reader_that_is_awake() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    with pytest.raises(BlockingIOError):
        os.read(inbox._waker.fd, 1)
    inbox.close()


class PutsBeforeThePoll:
    """Puts when the reader has looked at its items for the last time, and is not yet asleep."""

    def __init__(self, inbox: Inbox[object]) -> None:
        self._inbox, self._poll = inbox, inbox._poll
        self.found: list[tuple[int, int]] = []

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        assert timeout_ms == LONG_S * 1000
        self._inbox.put("late")
        self.found = self._poll.poll(0)
        return self.found


class PutsAfterTheFirstLook(deque[object]):
    """Puts when the reader has found it empty, and nobody knows yet that it goes to sleep."""

    inbox: Inbox[object] | None = None

    def __bool__(self) -> bool:
        inbox, self.inbox = self.inbox, None
        if inbox is None:
            return len(self) > 0
        assert not inbox._asleep
        inbox.put("late")
        return False


class NeverAsleep:
    """A poll that would be slept in."""

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        raise AssertionError(f"it would have slept for {timeout_ms} ms")


def test_what_comes_just_before_the_sleep_ends_it() -> None:
    with fed() as (inbox, pipe):
        inbox._poll = poll = PutsBeforeThePoll(inbox)  # type: ignore[assignment]
        assert inbox.drain(LONG_S) == ["late"]
        assert [fd for fd, _ in poll.found] == [inbox._waker.fd]
        os.close(pipe.end)


def test_what_comes_before_the_reader_is_known_to_sleep_keeps_it_awake() -> None:
    with fed() as (inbox, pipe):
        inbox._items = items = PutsAfterTheFirstLook()
        items.inbox = inbox
        inbox._poll = NeverAsleep()  # type: ignore[assignment]
        assert inbox.drain(LONG_S) == ["late"]
        os.close(pipe.end)


def test_many_puts_against_as_many_sleeps() -> None:
    with fed() as (inbox, pipe):
        count = 2000
        thread = threading.Thread(target=lambda: [inbox.put(number) for number in range(count)])
        thread.start()
        got: list[object] = []
        while len(got) < count:
            got += inbox.drain(LONG_S)
        thread.join()
        assert got == list(range(count))
        os.close(pipe.end)


def test_what_a_source_kept_is_not_slept_over() -> None:
    with fed() as (inbox, pipe):
        pipe.kept = ["kept"]
        assert inbox.drain(LONG_S) == ["kept"]
        os.close(pipe.end)


def test_the_end_of_a_source_wakes_its_reader_once() -> None:
    with fed() as (inbox, pipe), when_asleep(inbox, lambda: os.close(pipe.end)):
        assert inbox.drain(LONG_S) == []
        assert inbox._source is None


def test_a_source_that_has_ended_is_read_no_more_and_threads_go_on() -> None:
    with fed() as (inbox, pipe):
        os.write(pipe.end, b"\1")
        os.close(pipe.end)
        assert inbox.drain(LONG_S) == [1]
        assert inbox.drain() == []  # reads the end
        with when_asleep(inbox, lambda: inbox.put("a")):
            assert inbox.drain(LONG_S) == ["a"]
