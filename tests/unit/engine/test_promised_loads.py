"""Loads that are taken in before they have ended: when, and that each is counted once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from sessionkv.engine.copy_attempts import CopyAttempt
from sessionkv.engine.copy_lanes import CopiesStarted
from sessionkv.engine.device_memory import Copied
from sessionkv.engine.promised_loads import PromisedLoads
from sessionkv.types import BlockMove, MoveOutcome, Tier, Transfer, TransferResult
from tests.builders.store import ROOT, block

OK, IO_ERROR = MoveOutcome.OK, MoveOutcome.IO_ERROR
RECORD = block(ROOT, [1])


@dataclass
class Awaiting:
    """A scheduler of which a sequence awaits these transfers, alone."""

    awaited_alone: set[int]
    promised: list[TransferResult] = field(default_factory=list)

    def on_promise(self, result: TransferResult) -> None:
        self.promised.append(result)
        self.awaited_alone.discard(result.transfer_id)


class Silent(Copied):
    """Copies that do not say what will become of them."""

    def hold_steps(self) -> Any:
        return None


def started(number: int, count: int, *, kind: type[Copied] = Copied) -> CopiesStarted:
    moves = tuple(BlockMove(RECORD, i, i) for i in range(count))
    transfer = Transfer(number, Tier.HOST, Tier.DEVICE, moves)
    attempt = CopyAttempt(lambda copies, after: kind([True] * len(copies)), [None] * count, None)  # type: ignore[list-item]
    return CopiesStarted(transfer, list(range(count)), attempt)


def result(number: int, *outcomes: MoveOutcome, s: float = 0.5) -> TransferResult:
    return TransferResult(number, outcomes, s)


def test_the_last_copies_are_taken_in_once_all_are_under_way() -> None:
    scheduler: Any = Awaiting({2, 3})
    promised = PromisedLoads(scheduler)
    promised.started(started(2, 2))
    assert (scheduler.promised, len(promised)) == ([], 0)
    promised.started(started(3, 1))
    assert scheduler.promised == [result(2, OK, OK, s=0.0), result(3, OK, s=0.0)]
    assert len(promised) == 2
    promised.settle(result(2, OK, OK))
    promised.settle(result(3, OK))
    assert len(promised) == 0


def test_copies_for_others_are_not_counted_and_not_held_behind() -> None:
    scheduler: Any = Awaiting({2, 3})
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 5))  # of a sequence that was cancelled
    promised.started(started(2, 1))
    assert scheduler.promised == []
    promised.started(started(3, 1))
    assert [r.transfer_id for r in scheduler.promised] == [2, 3]
    scheduler.awaited_alone = {1, 4}
    promised.started(started(4, 1))
    assert [r.transfer_id for r in scheduler.promised] == [2, 3, 1, 4]


def test_what_was_answered_is_not_promised() -> None:
    scheduler: Any = Awaiting({2})
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2))
    promised.settle(result(1, OK, OK))
    scheduler.awaited_alone = {1, 2}
    promised.started(started(2, 1))
    assert scheduler.promised == []


def test_nobody_else_waits_for_them() -> None:
    scheduler: Any = Awaiting(set())
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2))
    promised.settle(result(1, OK, OK))
    assert (scheduler.promised, len(promised)) == ([], 0)


def test_those_that_promise_nothing_are_answered_as_ever() -> None:
    scheduler: Any = Awaiting({1, 2})
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 1, kind=Silent))
    promised.started(started(2, 2))
    assert [r.transfer_id for r in scheduler.promised] == [2]
    promised.settle(result(1, IO_ERROR))
    promised.settle(result(2, OK, OK))
    assert len(promised) == 0


def test_a_promise_that_is_broken_ends_the_engine() -> None:
    scheduler: Any = Awaiting({1})
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2))
    with pytest.raises(RuntimeError, match="launched behind"):
        promised.settle(result(1, OK, IO_ERROR))
