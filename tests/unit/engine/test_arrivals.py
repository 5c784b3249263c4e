from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sessionkv.engine.arrivals import Arrivals
from sessionkv.engine.messages import Drain, SubmitTurn
from sessionkv.types import SamplingParams


def ids(messages: Iterable[Any]) -> list[int]:
    return [message.turn_id for message in messages]


def turn(turn_id: int) -> SubmitTurn:
    return SubmitTurn(turn_id, "local", None, [1], 0, b"", b"", SamplingParams(), frozenset())


class Scripted:
    """An inbox: what is drained at each turn of the clock; how long was waited is noted."""

    def __init__(self, *batches: list[object]) -> None:
        self.batches, self.now = list(batches), 0.0
        self.waits: list[float] = []

    def drain(self, timeout_s: float) -> list[object]:
        self.waits.append(round(timeout_s, 6))
        self.now += 1.0
        return self.batches.pop(0) if self.batches else []

    def clock(self) -> float:
        return self.now


def test_turns_are_taken_until_the_time_is_up() -> None:
    inbox = Scripted([turn(1)], [], [turn(2), turn(3)], [turn(4)])
    arrivals = Arrivals(inbox.drain, inbox.clock)
    assert ids(arrivals.turns_until(3.5)) == [1, 2, 3]
    assert inbox.waits == [3.5, 2.5, 1.5, 0.5]
    assert ids(arrivals.take(7.0)) == [4]
    assert inbox.waits[4:] == [0.0]  # something is here


def test_a_burst_is_not_taken_beyond_the_time() -> None:
    inbox = Scripted([turn(1), turn(2), turn(3), turn(4)], [turn(5)])
    arrivals = Arrivals(inbox.drain, inbox.clock)
    taken = []
    for late in arrivals.turns_until(2.5):
        taken.append(late)
        inbox.now += 1.0  # what handling it takes
    assert ids(taken) == [1, 2]
    assert ids(arrivals.turns_until(inbox.now + 0.5)) == [3, 4]
    assert ids(arrivals.turns_until(inbox.now)) == []
    assert ids(arrivals.take(7.0)) == [5]


def test_what_comes_too_late_is_kept() -> None:
    inbox = Scripted([turn(1), turn(2)], [turn(3)])
    arrivals = Arrivals(inbox.drain, inbox.clock)
    assert ids(arrivals.turns_until(0.5)) == []
    assert ids(arrivals.take(7.0)) == [1, 2, 3]


def test_a_part_of_a_millisecond_is_not_waited_for() -> None:
    inbox = Scripted([], [turn(1)])
    arrivals = Arrivals(inbox.drain, inbox.clock)
    assert ids(arrivals.turns_until(20e-6)) == []
    assert inbox.waits == [0.0]
    inbox.now = 0.0
    assert ids(arrivals.turns_until(1.0019)) == [1]
    assert inbox.waits[1:] == [1.001, 0.001]


def test_what_is_no_turn_and_all_behind_it_wait_for_the_step() -> None:
    drain = Drain(1.0)
    inbox = Scripted([turn(1), drain, turn(2)], [turn(3)])
    arrivals = Arrivals(inbox.drain, inbox.clock)
    assert [turn.turn_id for turn in arrivals.turns_until(9.0)] == [1]
    assert list(arrivals.turns_until(9.0)) == []
    assert len(inbox.waits) == 1
    assert arrivals.take(7.0) == [drain, turn(2), turn(3)]
    assert inbox.waits[1:] == [0.0]  # something is here
    assert arrivals.take(0.5) == []


def test_nothing_is_asked_for_where_there_is_no_time() -> None:
    inbox = Scripted([turn(1)])
    assert list(Arrivals(inbox.drain, inbox.clock).turns_until(0.0)) == []
    assert inbox.waits == []
