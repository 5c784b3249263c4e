"""Core's end of the link: it waits for a front that is behind, and never keeps one from writing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sessionkv.actor.front_link import CoreEnd, FrontEnd, link_codec
from sessionkv.engine import messages as m
from sessionkv.errors import ConnectionLost
from sessionkv.ipc.frames import FrameSocket
from sessionkv.types import SamplingParams

LARGE = 100_000
"""Tokens: more than the kernel keeps between the two."""


@contextmanager
def both_ends() -> Iterator[tuple[CoreEnd, FrontEnd, FrameSocket]]:
    """Core's, the front's, and the socket under the front's."""
    ours, theirs = FrameSocket.pair()
    with ours, FrameSocket(theirs) as other:
        yield CoreEnd(ours, link_codec()), FrontEnd(other, link_codec(), silence_s=60.0), other


def wait_until(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    """For what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def prompt(turn_id: int) -> m.SubmitTurn:
    ids = tuple(range(70_000, 70_000 + LARGE))
    return m.SubmitTurn(
        turn_id, "local", "s", ids, 0, b"", b"", SamplingParams(seed=1), frozenset()
    )


def step(number: int) -> list[m.CoreMessage]:
    return [m.StepTokens(tuple(m.TurnTokens(turn, number, (5,), ()) for turn in range(256)))]


def test_two_that_write_at_once_and_more_than_fits_both_arrive_whole_and_in_order() -> None:
    steps, prompts = 250, 4
    with both_ends() as (core, front, _):
        running = threading.Thread(target=lambda: [core.put(step(n)) for n in range(steps)])
        running.start()
        wait_until(lambda: core.waiting_since is not None)  # it cannot write: nobody reads
        for turn_id in range(prompts):
            front.send([prompt(turn_id)])  # returns whatever core does
        while front.is_behind:
            front._frames.flush()  # and gets rid of all of it, though it reads nothing
        assert running.is_alive()
        told: list[Any] = []
        while len(told) < steps:
            told += front.take()
        running.join()
        assert core.waiting_since is None
        assert told == [message for n in range(steps) for message in step(n)]
        heard: list[Any] = []
        while len(heard) < prompts:
            heard += core.take()
        assert heard == [prompt(turn_id) for turn_id in range(prompts)]


def test_a_front_is_rid_of_what_did_not_fit_as_core_reads() -> None:
    with both_ends() as (core, front, _):
        front.send([prompt(0)])
        front.send([prompt(1)])
        front.send([m.StopAt(0, 1)])
        assert front.is_behind
        heard: list[Any] = []
        while len(heard) < 3:
            heard += core.take()
            assert front.take() == []  # sends the rest
        assert heard == [prompt(0), prompt(1), m.StopAt(0, 1)]
        assert not front.is_behind


def test_what_came_before_core_began_is_taken_first() -> None:
    with both_ends() as (core, front, _):
        front.send([m.PathWanted(3)])
        core.keep([link_codec().encode([m.PathWanted(1), m.PathWanted(2)])])
        assert core.take() == [m.PathWanted(1), m.PathWanted(2)]
        assert core.take() == [m.PathWanted(3)]
        assert core.take() == []


def test_a_front_that_is_gone_holds_nobody_up() -> None:
    with both_ends() as (core, front, socket):
        front.send([m.PathWanted(1)])
        socket.close()
        core.put(step(0))
        assert core.take() == [m.PathWanted(1)]
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                core.take()
            core.put(step(1))
        assert not core.has_left.is_set()


def test_a_front_that_goes_while_core_waits_for_it() -> None:
    with both_ends() as (core, _, socket):
        running = threading.Thread(target=lambda: [core.put(step(n)) for n in range(250)])
        running.start()
        wait_until(lambda: core.waiting_since is not None)
        socket.close()
        running.join(30)
        assert not running.is_alive()


def test_the_last_word_is_known_before_it_is_told_and_core_has_left_after() -> None:
    with both_ends() as (core, front, _):
        core.put(step(0))
        assert (core.stopped, core.has_left.is_set()) == (None, False)
        frame = link_codec().encode(step(1))
        while not core._frames.is_behind:
            core._frames.post(frame)
        last = threading.Thread(target=lambda: core.put([m.CoreStopped()]))
        last.start()
        wait_until(lambda: core.waiting_since is not None)
        assert not core.has_left.is_set()
        told: list[Any] = []
        while m.CoreStopped() not in told:
            assert core.stopped == m.CoreStopped() or not told
            told += front.take()
        last.join()
        assert core.has_left.is_set()
        assert core.waiting_since is not None  # for the front's end, from now on
