"""Loads that are used before their copies have ended keep their blocks at both ends until then."""

from __future__ import annotations

import pytest

from sessionkv.cache.block_pool import BlockState
from sessionkv.types import MoveOutcome, TransferResult
from tests.builders.kv_world import T, World

OK, IO_ERROR = MoveOutcome.OK, MoveOutcome.IO_ERROR


class Loading:
    """A sequence whose prompt is on the host alone, all of it on its way in one transfer."""

    def __init__(self, *, tail: int = 0, outcomes: dict[int, MoveOutcome] | None = None) -> None:
        self.world = World(device_blocks=10, host_blocks=40)
        self.world.turn(T(20 + tail))
        self.world.turn([1] * 39)
        self.world.turn([2] * 39)
        self.run = self.world.admit_now(self.world.chain(T(21 + tail)), claim=0)
        (self.transfer,) = self.world.claim(self.run)
        found = [(outcomes or {}).get(i, OK) for i in range(len(self.transfer.moves))]
        self.result = TransferResult(self.transfer.transfer_id, tuple(found), 0.0)
        self.kv = self.world.kv
        self.device, self.host = self.kv._residency.device, self.kv._residency.host

    def promise(self) -> int:
        """How many blocks the sequence is told of."""
        fetched = self.kv.promise_transfer(self.result)
        self.kv.check()
        return 0 if fetched is None else fetched.num_blocks

    def sources(self) -> set[BlockState]:
        return {self.host.state(move.src) for move in self.transfer.moves}

    def targets(self) -> set[BlockState]:
        return {self.device.state(move.dst) for move in self.transfer.moves}

    def settle(self) -> None:
        self.world.pending.clear()
        assert self.kv.finish_transfer(self.result) is None
        self.kv.check()


def test_what_is_promised_joins_and_its_sources_stay_held() -> None:
    loading = Loading()
    assert loading.promise() == 5
    meeting = loading.kv.advance(loading.run.seq_id)
    assert (meeting.front_tokens, meeting.over) == (20, True)
    assert loading.sources() == {BlockState.LEASED}
    assert loading.kv.ledger().transfers_in_flight == 1
    loading.settle()
    assert loading.sources() == {BlockState.CACHED}
    assert loading.targets() == {BlockState.LEASED}
    assert loading.kv.ledger().transfers_in_flight == 0
    loading.kv.finish(loading.run.seq_id)
    loading.kv.check()
    assert loading.targets() == {BlockState.CACHED}


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("preempted", [False, True])
def test_no_end_of_the_sequence_gives_a_block_away_before_the_copy_has_ended(
    tail: int, joined: bool, preempted: bool
) -> None:
    loading = Loading(tail=tail)
    loading.promise()
    if joined:
        loading.kv.advance(loading.run.seq_id)
    (loading.kv.preempt if preempted else loading.kv.finish)(loading.run.seq_id)
    loading.kv.check()
    assert loading.sources() == loading.targets() == {BlockState.LEASED}
    loading.settle()
    assert loading.sources() == loading.targets() == {BlockState.CACHED}
    ledger = loading.kv.ledger()
    assert (ledger.device.leased, ledger.device.filling, ledger.host.leased) == (0, 0, 0)


def test_content_that_is_forgotten_meanwhile_is_freed_with_the_copy() -> None:
    loading = Loading()
    loading.promise()
    loading.kv.forget([move.record.key for move in loading.transfer.moves])
    loading.kv.finish(loading.run.seq_id)
    loading.kv.check()
    assert loading.sources() == loading.targets() == {BlockState.LEASED}
    loading.settle()
    assert loading.sources() == loading.targets() == {BlockState.FREE}


def test_a_source_that_cannot_be_read_is_freed_with_the_copy() -> None:
    loading = Loading(outcomes={1: IO_ERROR})
    assert loading.promise() == 4
    assert loading.sources() == {BlockState.LEASED}
    loading.settle()
    assert loading.sources() == {BlockState.CACHED, BlockState.FREE}
    loading.kv.finish(loading.run.seq_id)
    loading.kv.check()
    assert loading.device.num_leased == loading.device.num_filling == 0


def test_others_find_what_is_promised_and_transfers_are_told_apart() -> None:
    loading = Loading()
    kv, number = loading.kv, loading.transfer.transfer_id
    assert kv.transfers_of(loading.run.seq_id) == {number}
    assert kv.transfers_of(loading.run.seq_id + 1) == set()
    loading.promise()
    assert kv.transfers_of(loading.run.seq_id) == set()
    match = kv.match(loading.world.chain(T(21)))
    assert (match.device_tokens, match.waits_for_transfer) == (20, None)
    with pytest.raises(KeyError):
        kv.promise_transfer(loading.result)
    cancelled = Loading()
    cancelled.kv.finish(cancelled.run.seq_id)
    assert cancelled.kv.transfers_of(cancelled.run.seq_id) == set()
