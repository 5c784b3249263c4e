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
    """A scheduler of which a sequence awaits so many blocks, alone."""

    num_awaited_alone: int
    taken: list[TransferResult] = field(default_factory=list)

    def on_transfer(self, result: TransferResult, now: float) -> None:
        del now
        self.taken.append(result)


class Silent(Copied):
    """Copies that do not say what will become of them."""

    def hold_steps(self) -> Any:
        return None


def started(number: int, count: int, *, kind: type[Copied] = Copied) -> CopiesStarted:
    moves = tuple(BlockMove(RECORD, i, i) for i in range(count))
    transfer = Transfer(number, Tier.HOST, Tier.DEVICE, moves)
    attempt = CopyAttempt(lambda copies, after: kind([True] * len(copies)), [None] * count, None)  # type: ignore[list-item]
    return CopiesStarted(transfer, list(range(count)), attempt)


def result(number: int, *outcomes: MoveOutcome) -> TransferResult:
    return TransferResult(number, outcomes, 0.5)


def test_the_last_copies_are_taken_in_once_all_are_under_way() -> None:
    scheduler: Any = Awaiting(5)
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2), 0.0)
    assert not promised.settle(result(1, OK, OK))
    scheduler.num_awaited_alone = 3
    promised.started(started(2, 2), 0.0)
    assert (scheduler.taken, len(promised)) == ([], 0)
    promised.started(started(3, 1), 0.0)
    assert [(r.transfer_id, r.outcomes) for r in scheduler.taken] == [(2, (OK, OK)), (3, (OK,))]
    assert len(promised) == 2
    assert promised.settle(result(2, OK, OK))
    assert promised.settle(result(3, OK))
    assert not promised.settle(result(3, OK))
    assert len(promised) == 0


def test_nobody_else_waits_for_them() -> None:
    scheduler: Any = Awaiting(0)
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2), 0.0)
    assert not promised.settle(result(1, OK, OK))
    assert scheduler.taken == []


def test_those_that_promise_nothing_are_answered_as_ever() -> None:
    scheduler: Any = Awaiting(3)
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 1, kind=Silent), 0.0)
    promised.started(started(2, 2), 0.0)
    assert [r.transfer_id for r in scheduler.taken] == [2]
    assert not promised.settle(result(1, IO_ERROR))
    assert promised.settle(result(2, OK, OK))


def test_a_promise_that_is_broken_ends_the_engine() -> None:
    scheduler: Any = Awaiting(2)
    promised = PromisedLoads(scheduler)
    promised.started(started(1, 2), 0.0)
    with pytest.raises(RuntimeError, match="launched behind"):
        promised.settle(result(1, OK, IO_ERROR))
