"""Transfers that are not answered hold nobody up for ever."""

from __future__ import annotations

import pytest

from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.transfers import LATE_FACTOR, LATE_S
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    Match,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import Loop, make_scheduler, make_sequence, spans

RECORD = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1, 2, 3, 4))


def answer(scheduler: Scheduler, transfer: Transfer, now: float) -> None:
    outcomes = (MoveOutcome.OK,) * len(transfer.moves)
    scheduler.on_transfer(TransferResult(transfer.transfer_id, outcomes, 0.1), now)


def test_spills_that_are_overdue_are_not_waited_for() -> None:
    kv = FakeKV(4)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    kv.spills = [Transfer(900, Tier.DEVICE, Tier.HOST, (BlockMove(RECORD, 0, 0),))]
    kv._held_back = {900: [kv.free.pop()]}
    scheduler.add(make_sequence(1, range(4), max_tokens=9), 0.0)
    scheduler.add(make_sequence(2, range(7), max_tokens=3), 0.0)
    loop.step()
    loop.step()
    assert scheduler.num_preemptions == 0
    kv.overdue_spills = (900,)
    plan = loop.step()
    assert plan is not None
    assert spans(plan) == [(1, 4, 5)]
    assert scheduler.num_preemptions == 1


def fetching(*seq_ids: int) -> tuple[Scheduler, FakeKV, list[Transfer]]:
    """Sequences of 18 tokens, 12 of them on disk and being read since 0.0."""
    kv = FakeKV(20)
    scheduler = make_scheduler(kv)
    for seq_id in seq_ids:
        kv.queries[seq_id] = DiskQuery((), BlockHash(b"p"), (), 0)
        kv.matches[seq_id] = Match(0, 0, 12)
        scheduler.add(make_sequence(seq_id, [seq_id] * 18, max_tokens=1), 0.0)
        receipt = DiskReceipt(70 + seq_id, (DiskBlock(RECORD, 0),), None)
        scheduler.on_receipt(seq_id, receipt)
    assert len(scheduler.take_lookups()) == len(seq_ids)
    assert scheduler.schedule(0.0) is None
    return scheduler, kv, scheduler.take_transfers()


def test_a_sequence_whose_reads_are_late_goes_on_without_disk() -> None:
    scheduler, kv, reads = fetching(1)
    assert [(t.src, len(t.moves)) for t in reads] == [(Tier.DISK, 3)]
    assert scheduler.schedule(LATE_S - 0.1) is None
    assert not scheduler.disk_is_late
    assert scheduler.num_running == 1
    plan = scheduler.schedule(LATE_S)
    assert scheduler.disk_is_late
    assert scheduler.take_lookups() == []
    assert ("finish", 1, None) in kv.calls
    assert plan is not None
    assert spans(plan)[0][:2] == (1, 0)
    assert scheduler.get(1).disk_was_late
    assert scheduler.take_receipts() == []  # its slots are still being read
    kv._fetching.clear()
    kv.finish_transfer = lambda result: None
    answer(scheduler, reads[0], LATE_S + 11.0)
    assert scheduler.take_receipts() == [71]
    assert not scheduler.disk_is_late


def test_an_answer_begins_the_time_anew_and_says_how_long_the_next_may_take() -> None:
    scheduler, _, reads = fetching(1, 2)
    assert len(reads) == 2
    answer(scheduler, reads[0], LATE_S - 1.0)
    scheduler.schedule(LATE_S)
    assert not scheduler.disk_is_late
    scheduler.take_transfers()
    assert scheduler._desk.give_up_reads((LATE_S - 1.0) * (1 + LATE_FACTOR) - 0.1) == set()
    late = scheduler._desk.give_up_reads((LATE_S - 1.0) * (1 + LATE_FACTOR))
    assert late == {reads[1].transfer_id}
    assert scheduler.disk_is_late


@pytest.mark.parametrize("late", [False, True])
def test_others_wait_for_a_read_unless_it_is_late(late: bool) -> None:
    scheduler, kv, reads = fetching(1)
    kv.matches[2] = Match(0, 0, 0, waits_for_transfer=reads[0].transfer_id)
    now = LATE_S if late else 0.1
    scheduler.add(make_sequence(2, [2] * 5, max_tokens=1), 0.0)
    plan = scheduler.schedule(now)
    assert (plan is not None) is late
