from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store.block_store import BlockStore
from sessionkv.store.block_thread import MAX_SEARCHES
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import (
    CloseReport,
    Committed,
    DiskEvicted,
    Held,
    LookedUp,
    StoreAnswer,
    StoreWorker,
)
from sessionkv.types import (
    BlockMove,
    BlockRecord,
    JournalOp,
    MoveOutcome,
    PutHead,
    PutNode,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.store import IDENTITY, ROOT, Gates, block, geometry, head, node, payload, query

OK, NO_ROOM, MISSING = MoveOutcome.OK, MoveOutcome.NO_ROOM, MoveOutcome.MISSING
MIB = 2**20


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(tmp_path / "store") as opened:
        yield opened


class Bench:
    """A worker over a real store, its answers in order."""

    def __init__(
        self, directory: StoreDirectory, *shut: str, slots: int = 60, journal: Journal | None = None
    ) -> None:
        self.answers: SimpleQueue[StoreAnswer] = SimpleQueue()
        self.gates = Gates(*shut)
        cap = slots * (MIB + 4096) + MIB // 2
        blocks = BlockStore(directory, IDENTITY, geometry(MIB), cap_bytes=cap, gates=self.gates)
        self.worker = StoreWorker(
            journal or Journal(directory), blocks, self.answers, gates=self.gates
        )

    def next(self) -> StoreAnswer:
        return self.answers.get(timeout=30)

    def write(
        self,
        number: int,
        *records: BlockRecord,
        reply_to: SimpleQueue[TransferResult] | None = None,
    ) -> None:
        moves = tuple(BlockMove(record, i, -1) for i, record in enumerate(records))
        views = [memoryview(payload(record, MIB)) for record in records]
        transfer = Transfer(number, Tier.HOST, Tier.DISK, moves)
        self.worker.transfer(transfer, views, reply_to=reply_to)

    def outcomes(self) -> tuple[int, tuple[MoveOutcome, ...]]:
        answer = self.next()
        assert isinstance(answer, TransferResult)
        assert answer.elapsed_s >= 0
        return answer.transfer_id, answer.outcomes


def test_a_search_says_which_blocks_are_on_disk(directory: StoreDirectory) -> None:
    bench = Bench(directory)
    first = block(ROOT, (1, 2, 3, 4))
    second = block(first.key, (5, 6, 7, 8))
    bench.write(1, first)
    assert bench.outcomes() == (1, (OK,))
    bench.worker.search(2, [second.key, first.key])
    assert bench.next() == Held(2, frozenset({first.key}))
    bench.worker.close(5)


def test_too_many_searches_are_told_so_at_once(directory: StoreDirectory) -> None:
    bench = Bench(directory, "before_lookup")
    bench.worker.lookup(0, query((1, 2, 3, 4)))
    assert bench.gates.reached["before_lookup"].wait(30)
    for ticket in range(1, MAX_SEARCHES + 2):
        bench.worker.search(ticket, [])
    assert bench.next() == Held(MAX_SEARCHES + 1, None)
    bench.gates.open("before_lookup")
    bench.worker.close(5)


def test_a_long_search_lets_lookups_pass(directory: StoreDirectory) -> None:
    bench = Bench(directory, "before_lookup")
    asked = query((1, 2, 3, 4))
    bench.worker.lookup(1, asked)  # holds the thread at the gate
    assert bench.gates.reached["before_lookup"].wait(30)
    keys = [block(ROOT, (n,)).key for n in range(5000)]
    bench.worker.search(2, keys)
    bench.worker.lookup(3, asked)
    bench.gates.open("before_lookup")
    assert [bench.next().ticket for _ in range(3)] == [1, 3, 2]  # type: ignore[union-attr]
    bench.worker.close(5)


def test_commits_are_answered_in_order_and_grouped(directory: StoreDirectory) -> None:
    commits: list[list[Sequence[JournalOp]]] = []

    class Recording(Journal):
        def commit(self, batches: Sequence[Sequence[JournalOp]]) -> None:  # type: ignore[override]
            commits.append(list(batches))
            super().commit(batches)

    bench = Bench(directory, "before_commit", journal=Recording(directory))
    bench.worker.commit(1, [PutNode(node(1))])
    assert bench.gates.reached["before_commit"].wait(30)
    for ticket in (2, 3, 4):
        bench.worker.commit(ticket, [PutNode(node(ticket, 1)), PutHead(head("a", ticket))])
    bench.gates.open("before_commit")
    assert [bench.next() for _ in range(4)] == [Committed(t, None) for t in (1, 2, 3, 4)]
    assert [len(group) for group in commits] == [1, 3]
    assert bench.worker.close(5) == CloseReport(0, 0, False)
    journal = Journal(directory)
    assert journal.load().heads == (head("a", 4),)
    journal.close()


def test_a_refused_commit_refuses_what_may_stand_on_it(directory: StoreDirectory) -> None:
    bench = Bench(directory, "before_commit")
    bench.worker.commit(1, [PutNode(node(1))])
    bench.worker.commit(2, [PutNode(node(1))])  # no turn is written twice
    bench.worker.commit(3, [PutNode(node(3, 1))])
    bench.gates.open("before_commit")
    assert bench.next() == Committed(1, None)
    errors = [bench.next(), bench.next()]
    assert [answer.ticket for answer in errors if isinstance(answer, Committed)] == [2, 3]
    assert [type(a.error) for a in errors if isinstance(a, Committed)] == [
        StoreError,
        StoreUnavailable,
    ]
    bench.worker.commit(4, [PutNode(node(4, 1))])  # submitted before taking notice
    late = bench.next()
    assert isinstance(late, Committed)
    assert late.error is not None
    bench.worker.accept_again(3)  # not the one that failed
    bench.worker.commit(5, [PutNode(node(5, 1))])
    still = bench.next()
    assert isinstance(still, Committed)
    assert still.error is not None
    bench.worker.accept_again(2)
    bench.worker.commit(6, [PutNode(node(6, 1))])
    assert bench.next() == Committed(6, None)
    bench.worker.close(5)
    journal = Journal(directory)
    assert [n.node_id for n in journal.load().nodes] == [1, 6]
    journal.close()


def test_a_block_goes_to_disk_and_comes_back(directory: StoreDirectory) -> None:
    bench = Bench(directory)
    first = block(ROOT, [1, 2, 3, 4])
    second = block(first.key, [5, 6])
    bench.write(1, first, second)
    assert bench.outcomes() == (1, (OK, OK))
    bench.worker.lookup(9, query([1, 2, 3, 4, 5, 6, 7]))
    answer = bench.next()
    assert isinstance(answer, LookedUp)
    receipt = answer.receipt
    assert receipt is not None
    assert receipt.tail is not None
    found = [*receipt.blocks, receipt.tail]
    assert [f.record for f in found] == [first, second]
    targets = [memoryview(bytearray(MIB)) for _ in found]
    moves = tuple(BlockMove(f.record, f.slot, i) for i, f in enumerate(found))
    bench.worker.transfer(Transfer(2, Tier.DISK, Tier.DEVICE, moves), targets)
    assert bench.outcomes() == (2, (OK, OK))
    assert [bytes(t) for t in targets] == [bytes(payload(r, MIB)) for r in (first, second)]
    bench.worker.release(receipt.receipt_id)
    with pytest.raises(StoreError, match="is not held"):
        bench.worker.release(receipt.receipt_id)
    bench.worker.close(5)


def test_lookups_and_reads_pass_a_spill(directory: StoreDirectory) -> None:
    bench = Bench(directory, "disk_put_half", slots=100)
    there = block(ROOT, [99] * 4)
    bench.write(1, *(block(ROOT, [i] * 4) for i in range(70)))  # two pieces
    assert bench.gates.reached["disk_put_half"].wait(30)
    bench.write(2, there)
    # Both are answered while the spill is held.
    bench.worker.lookup(3, query([0] * 4))
    answer = bench.next()
    assert isinstance(answer, LookedUp)
    assert answer.receipt is not None
    assert answer.receipt.blocks == ()  # not there before its commit
    moves = (BlockMove(there, 7, 0),)
    bench.worker.transfer(Transfer(4, Tier.DISK, Tier.HOST, moves), [memoryview(bytearray(MIB))])
    assert bench.outcomes() == (4, (MISSING,))  # that slot holds another block
    bench.gates.open("disk_put_half")
    assert bench.outcomes() == (1, (OK,) * 70)
    assert bench.outcomes() == (2, (OK,))
    bench.worker.close(5)


def test_transfers_of_one_direction_are_answered_in_order(directory: StoreDirectory) -> None:
    bench = Bench(directory)
    records = [block(ROOT, [i] * 4) for i in range(40)]
    bench.write(1, *records)
    assert bench.outcomes() == (1, (OK,) * 40)
    found = []
    for ticket, record in enumerate(records):
        bench.worker.lookup(ticket, query(list(record.token_ids)))
        answer = bench.next()
        assert isinstance(answer, LookedUp)
        assert answer.receipt is not None
        found += answer.receipt.blocks
    targets = [memoryview(bytearray(MIB)) for _ in found]
    parts = [slice(0, 21), slice(21, 21), slice(21, 22), slice(22, 40)]
    for number, part in enumerate(parts):
        moves = tuple(BlockMove(f.record, f.slot, 0) for f in found[part])
        bench.worker.transfer(Transfer(number, Tier.DISK, Tier.HOST, moves), targets[part])
    assert [bench.outcomes() for _ in parts] == [
        (number, (OK,) * (part.stop - part.start)) for number, part in enumerate(parts)
    ]
    assert [bytes(t) for t in targets] == [bytes(payload(r, MIB)) for r in records]
    bench.worker.close(5)


def test_a_deleted_block_does_not_come_back_with_a_write_before_it(
    directory: StoreDirectory,
) -> None:
    bench = Bench(directory, "disk_put_half")
    record = block(ROOT, [1] * 4)
    bench.write(1, record)
    assert bench.gates.reached["disk_put_half"].wait(30)
    bench.worker.delete([record.key])
    bench.write(2, block(ROOT, [2] * 4))
    bench.gates.open("disk_put_half")
    assert [bench.outcomes(), bench.outcomes()] == [(1, (OK,)), (2, (OK,))]
    bench.worker.lookup(3, query([1] * 4))
    answer = bench.next()
    assert isinstance(answer, LookedUp)
    assert answer.receipt is not None
    assert answer.receipt.blocks == ()
    bench.worker.close(5)


def test_evictions_are_told_after_the_result_that_caused_them(directory: StoreDirectory) -> None:
    bench = Bench(directory, slots=12)
    old = [block(ROOT, [i] * 4) for i in range(3)]
    bench.write(1, *old)
    assert bench.outcomes() == (1, (OK,) * 3)
    bench.write(2, *(block(ROOT, [50 + i] * 4) for i in range(11)))
    assert bench.outcomes() == (2, (OK,) * 11)
    assert bench.next() == DiskEvicted((old[0].key, old[1].key))
    bench.worker.delete([old[2].key])
    bench.worker.lookup(3, query([77] * 4))
    assert isinstance(bench.next(), LookedUp)
    bench.write(4, block(ROOT, [70] * 4))
    assert bench.outcomes() == (4, (OK,))
    bench.worker.close(5)
    assert bench.answers.empty()


def test_closing_drops_what_does_not_fit_the_time_and_says_so(directory: StoreDirectory) -> None:
    bench = Bench(directory, "disk_put_half")
    records = [block(ROOT, [i] * 4) for i in range(30)]
    bench.write(1, *records)
    bench.write(2, block(ROOT, [99] * 4))
    assert bench.gates.reached["disk_put_half"].wait(30)
    bench.worker.commit(7, [PutNode(node(1))])
    assert bench.next() == Committed(7, None)
    bench.gates.open("disk_put_half")
    report = bench.worker.close(0)
    assert (report.dropped_commits, report.is_stuck) == (0, False)
    number, outcomes = bench.outcomes()
    assert number == 1
    assert outcomes == (OK,) * outcomes.count(OK) + (NO_ROOM,) * outcomes.count(NO_ROOM)
    assert bench.outcomes()[1] in ((OK,), (NO_ROOM,))
    assert report.dropped_moves >= outcomes.count(NO_ROOM)
    bench.worker.commit(8, [])
    late = bench.next()
    assert isinstance(late, Committed)
    assert isinstance(late.error, StoreUnavailable)
    bench.write(3, block(ROOT, [98] * 4))
    assert bench.outcomes() == (3, (NO_ROOM,))


def test_whoever_is_named_takes_the_result(directory: StoreDirectory) -> None:
    bench = Bench(directory, "disk_put_half")
    elsewhere: SimpleQueue[TransferResult] = SimpleQueue()
    bench.write(1, block(ROOT, [1] * 4), reply_to=elsewhere)
    assert bench.gates.reached["disk_put_half"].wait(30)
    bench.write(2, block(ROOT, [2] * 4), reply_to=elsewhere)
    bench.gates.open("disk_put_half")
    bench.worker.close(0)
    bench.write(3, block(ROOT, [3] * 4), reply_to=elsewhere)
    assert [elsewhere.get(timeout=30).transfer_id for _ in range(3)] == [1, 2, 3]
    assert elsewhere.empty()
    assert bench.answers.empty()


def test_without_a_disk_tier_nothing_is_found_and_nothing_taken(directory: StoreDirectory) -> None:
    answers: SimpleQueue[StoreAnswer] = SimpleQueue()
    worker = StoreWorker(Journal(directory), None, answers)
    worker.lookup(1, query([1, 2, 3, 4]))
    record = block(ROOT, [1])
    view = memoryview(bytearray(8))
    worker.transfer(Transfer(2, Tier.HOST, Tier.DISK, (BlockMove(record, 0, -1),)), [view])
    worker.transfer(Transfer(3, Tier.DISK, Tier.HOST, (BlockMove(record, 0, 0),)), [view])
    assert [answers.get(timeout=5) for _ in range(3)] == [
        LookedUp(1, None),
        TransferResult(2, (NO_ROOM,), 0.0),
        TransferResult(3, (MISSING,), 0.0),
    ]
    assert worker.stats() is None
    assert worker.close(5) == CloseReport(0, 0, False)


def test_a_write_that_raises_is_an_outcome(directory: StoreDirectory) -> None:
    bench = Bench(directory)
    move = BlockMove(block(ROOT, [1]), 0, -1)
    small = memoryview(bytearray(5))
    bench.worker.transfer(Transfer(1, Tier.HOST, Tier.DISK, (move,)), [small])
    assert bench.outcomes() == (1, (MoveOutcome.IO_ERROR,))
    bench.write(2, block(ROOT, [2]))
    assert bench.outcomes() == (2, (OK,))
    bench.worker.close(5)
