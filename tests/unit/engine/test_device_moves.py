"""Moves to and from a pool that only copies reach, over the real mover and the real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sessionkv.engine.copy_lanes import STARTED
from sessionkv.engine.device_memory import DeviceMemory
from sessionkv.engine.gpu.copier import GpuCopier
from sessionkv.store.worker import DiskEvicted
from sessionkv.types import BlockRecord, MoveOutcome, Tier, TransferResult
from tests.builders.deferred_device import UNFINISHED, DeferredDevice
from tests.builders.store import ROOT, block, chain, payload, query
from tests.builders.tiers import BLOCK, Tiers

OK, IO_ERROR = MoveOutcome.OK, MoveOutcome.IO_ERROR
MISSING, CORRUPT, NO_ROOM = MoveOutcome.MISSING, MoveOutcome.CORRUPT, MoveOutcome.NO_ROOM
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
BLOCKS = 12
Move = tuple[BlockRecord, int, int]


class Bench:
    """Tiers around a deferred device, and records whose payloads are known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tiers: Any = None
        self.device: Any = None
        self.records = chain(list(range(4 * BLOCKS)))

    def open(self, *shut: str, **options: Any) -> None:
        device_gates = [name for name in shut if name.startswith("wait_")]
        others = [name for name in shut if name not in device_gates]
        self.device = DeferredDevice(BLOCKS, BLOCK, *device_gates)
        self.tiers = Tiers(self._folder, *others, num_blocks=BLOCKS, memory=self.device, **options)

    def fill_device(self) -> None:
        for i, record in enumerate(self.records):
            self.device.extent(i)[:] = payload(record)

    def to_disk(self, records: list[BlockRecord]) -> None:
        """Bring payloads to disk past the device."""
        for i, record in enumerate(records):
            self.tiers.host.view(i)[:] = payload(record)
        self.submit(HOST, DISK, [(record, i, -1) for i, record in enumerate(records)])
        assert self.outcomes() == [OK] * len(records)

    def slots(self) -> list[int]:
        """Where the disk has the records, as far as the chain reaches."""
        self.tiers.store.lookup(0, query(list(range(4 * BLOCKS))))
        return [found.slot for found in self.tiers.answers.get(timeout=30).receipt.blocks]

    def submit(self, src: Tier, dst: Tier, moves: list[Move]) -> int:
        number: int = self.tiers.submit(src, dst, *moves)
        return number

    def fetches(self) -> list[Move]:
        """All that the disk has, each to the device block of its number."""
        return [(self.records[i], slot, i) for i, slot in enumerate(self.slots())]

    def spills(self) -> list[Move]:
        """All device blocks, to the disk."""
        return [(record, i, -1) for i, record in enumerate(self.records)]

    def result(self) -> TransferResult:
        answer = self.tiers.answers.get(timeout=30)
        if isinstance(answer, DiskEvicted):  # before the result or after it
            answer = self.tiers.answers.get(timeout=30)
        assert isinstance(answer, TransferResult)
        return answer

    def outcomes(self) -> list[MoveOutcome]:
        return list(self.result().outcomes)

    def extents(self) -> list[bytes]:
        return [bytes(self.device.extent(i)) for i in range(BLOCKS)]

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
            while not self.tiers.answers.empty():
                assert isinstance(self.tiers.answers.get(), DiskEvicted), "answered twice"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store")
    yield made
    made.close()


PAYLOADS = [bytes(payload(record)) for record in chain(list(range(4 * BLOCKS)))]
UNTOUCHED = b"\xee" * BLOCK


# -- bytes


def deferred() -> tuple[DeviceMemory, Callable[[int], memoryview]]:
    device = DeferredDevice(4, BLOCK)
    return device, device.extent


def tensor() -> tuple[DeviceMemory, Callable[[int], memoryview]]:
    pool = torch.zeros((4, 2, BLOCK // 4), dtype=torch.bfloat16)
    pool.view(torch.uint8).fill_(0xEE)
    return GpuCopier(pool), lambda i: memoryview(pool[i].view(torch.uint8).flatten().numpy())


@pytest.mark.parametrize("make", [deferred, tensor])
def test_bytes_are_equal_through_every_hop(
    make: Callable[[], tuple[DeviceMemory, Callable[[int], memoryview]]], tmp_path: Path
) -> None:
    memory, extent = make()
    tiers = Tiers(tmp_path / "store", memory=memory)
    first, second = block(ROOT, [1, 2, 3, 4]), block(ROOT, [5, 6, 7, 8])
    extent(0)[:] = payload(first)
    extent(1)[:] = payload(second)
    tiers.submit(DEVICE, HOST, (first, 0, 2))
    assert tiers.result()[1] == (OK,)
    tiers.submit(HOST, DISK, (first, 2, -1))
    assert tiers.result()[1] == (OK,)
    tiers.submit(DEVICE, DISK, (second, 1, -1))
    assert tiers.result()[1] == (OK,)
    extent(0)[:] = extent(1)[:] = UNTOUCHED
    tiers.submit(HOST, DEVICE, (first, 2, 0))
    assert tiers.result()[1] == (OK,)
    tiers.submit(DISK, DEVICE, (first, tiers.find(first), 3))
    assert tiers.result()[1] == (OK,)
    tiers.submit(DISK, DEVICE, (second, tiers.find(second), 1))
    assert tiers.result()[1] == (OK,)
    expected = [payload(first), payload(second), UNTOUCHED, payload(first)]
    assert [bytes(extent(i)) for i in range(4)] == [bytes(data) for data in expected]
    tiers.close()


@pytest.mark.parametrize("staging_blocks", [1, 3, 5, 64])
def test_transfers_larger_than_staging(bench: Bench, staging_blocks: int) -> None:
    bench.open(staging_blocks=staging_blocks)
    bench.fill_device()
    began_s = time.monotonic()
    written = [bench.submit(DEVICE, DISK, bench.spills()[i : i + 6]) for i in (0, 6)]
    results = [bench.result() for _ in written]
    assert [result.transfer_id for result in results] == written
    assert all(result.outcomes == (OK,) * 6 for result in results)
    assert 0 < sum(result.elapsed_s for result in results) <= time.monotonic() - began_s
    moves = [(record, slot, BLOCKS - 1 - i) for i, (record, slot, _) in enumerate(bench.fetches())]
    read = [bench.submit(DISK, DEVICE, part) for part in (moves[:7], moves[7:])]
    results = [bench.result() for _ in read]
    assert [result.transfer_id for result in results] == read
    assert [result.outcomes for result in results] == [(OK,) * 7, (OK,) * 5]
    assert bench.extents() == PAYLOADS[::-1]
    size = max(2, staging_blocks) * BLOCK
    assert bench.device.pinned == [(size, BLOCK), (size, BLOCK), (BLOCKS * BLOCK, BLOCK)]


def test_the_next_piece_is_read_while_one_is_copied(bench: Bench) -> None:
    bench.open("wait_in", staging_blocks=2)
    bench.to_disk(bench.records[:4])
    bench.submit(DISK, DEVICE, bench.fetches())
    assert bench.device.gates.reached["wait_in"].wait(30)
    bench.submit(HOST, DISK, [(block(ROOT, [99]), 0, -1)])
    # Writes come after all reads: by this answer there is nothing that is still to be read.
    assert bench.outcomes() == [OK]
    assert bench.tiers.gates.arrivals.count("before_read") == 2
    assert bench.device.log == [("start", "in", (0,))]
    bench.device.gates.open("wait_in")
    assert bench.outcomes() == [OK] * 4
    assert bench.extents()[:4] == PAYLOADS[:4]


# -- order


def test_a_spill_holds_what_was_launched_before_it_and_nothing_later(bench: Bench) -> None:
    bench.open()
    device, host, record = bench.device, bench.tiers.host, bench.records[0]

    def launch(data: bytes) -> None:
        device.launch(lambda: device.extent(0).__setitem__(slice(None), data))

    launch(PAYLOADS[1])
    bench.submit(DEVICE, HOST, [(record, 0, 1)])
    launch(PAYLOADS[2])
    assert bench.outcomes() == [OK]
    assert bytes(host.view(1)) == bytes(device.extent(0)) == PAYLOADS[1]
    bench.submit(DEVICE, DISK, [(record, 0, -1)])
    launch(PAYLOADS[3])
    assert bench.outcomes() == [OK]
    bench.submit(DISK, HOST, [(record, bench.slots()[0], 2)])
    assert bench.outcomes() == [OK]
    assert bytes(host.view(2)) == bytes(device.extent(0)) == PAYLOADS[2]


@pytest.mark.parametrize("source", [HOST, DISK])
def test_a_fetch_overwrites_only_what_steps_before_have_read(bench: Bench, source: Tier) -> None:
    bench.open()
    bench.to_disk(bench.records[:1])
    seen: list[bytes] = []
    bench.device.launch(lambda: seen.append(bytes(bench.device.extent(5))))
    bench.submit(source, DEVICE, [(bench.records[0], bench.slots()[0] if source is DISK else 0, 5)])
    bench.device.launch(lambda: seen.append(bytes(bench.device.extent(5))))
    assert bench.outcomes() == [OK]
    bench.device.run_steps(2)
    assert seen == [UNTOUCHED, PAYLOADS[0]]


def test_both_directions_go_on_at_once(bench: Bench) -> None:
    bench.open("wait_in")
    bench.fill_device()
    up = bench.submit(HOST, DEVICE, [(bench.records[0], 0, 0)])
    assert bench.device.gates.reached["wait_in"].wait(30)
    down = bench.submit(DEVICE, HOST, [(bench.records[1], 1, 1)])
    assert bench.result().transfer_id == down
    bench.device.gates.open("wait_in")
    assert bench.result().transfer_id == up


def _long_step() -> None:
    until_s = time.monotonic() + 0.05
    while time.monotonic() < until_s:
        pass


def test_the_next_transfers_start_before_the_one_before_has_ended(bench: Bench) -> None:
    bench.open("before_h2d")
    bench.device.launch(_long_step)
    bench.submit(HOST, DEVICE, [(bench.records[0], 0, 0), (bench.records[1], 1, 1)])
    assert bench.tiers.gates.reached["before_h2d"].wait(30)
    for i in range(2, 2 + STARTED):
        bench.submit(HOST, DEVICE, [(bench.records[i], i, i)])
    began_s = time.monotonic()
    bench.tiers.gates.open("before_h2d")
    results = [bench.result() for _ in range(1 + STARTED)]
    assert [result.transfer_id for result in results] == list(range(1, 2 + STARTED))
    assert bench.device.log[: STARTED + 2] == [
        ("start", "in", (0, 1)),
        *(("start", "in", (i,)) for i in range(2, STARTED + 1)),
        ("end", "in", (0, 1)),
        ("start", "in", (STARTED + 1,)),
    ]
    # Rates come from these: what overlaps counts once.
    assert sum(result.elapsed_s for result in results) <= time.monotonic() - began_s


def test_a_disk_that_hangs_holds_up_nothing_else(bench: Bench) -> None:
    bench.open("before_read", "disk_put_half")
    bench.fill_device()
    reading = bench.submit(DISK, DEVICE, [(bench.records[0], 0, 0)])
    assert bench.tiers.gates.reached["before_read"].wait(30)
    for src, dst in ((DEVICE, HOST), (HOST, DEVICE)):
        number = bench.submit(src, dst, [(bench.records[i], i, i) for i in range(4, 8)])
        assert bench.result().transfer_id == number
    bench.tiers.gates.open("before_read")
    assert bench.result().transfer_id == reading
    writing = bench.submit(DEVICE, DISK, bench.spills())
    assert bench.tiers.gates.reached["disk_put_half"].wait(30)
    number = bench.submit(DEVICE, HOST, [(bench.records[4], 4, 4)])
    assert bench.result().transfer_id == number
    bench.tiers.gates.open("disk_put_half")
    assert bench.result().transfer_id == writing


# -- steps that are held behind copies


def test_a_step_that_is_held_reads_what_a_fetch_brings(bench: Bench) -> None:
    bench.open("wait_in")
    bench.device.promises = True
    bench.device.bad_blocks = {2}
    bench.tiers.host.view(0)[:], bench.tiers.host.view(1)[:] = PAYLOADS[:2]
    moves = [(bench.records[0], 0, 5), (bench.records[1], BLOCKS, 1), (bench.records[1], 1, 2)]
    number = bench.submit(HOST, DEVICE, moves)
    assert bench.device.gates.reached["wait_in"].wait(30)
    (started,) = bench.tiers.answers.started
    promised = started.promise()
    assert promised is not None
    assert promised == TransferResult(number, (OK, IO_ERROR, IO_ERROR), 0.0)
    unfinished = bytes([UNFINISHED]) * BLOCK
    assert [bench.extents()[i] for i in (1, 2, 5)] == [UNTOUCHED, UNTOUCHED, unfinished]
    seen: list[bytes] = []
    bench.device.launch(lambda: seen.append(bytes(bench.device.extent(5))))
    bench.submit(DEVICE, HOST, [(bench.records[0], 5, 3)])
    assert bench.outcomes() == [OK]
    assert (seen, bytes(bench.tiers.host.view(3))) == ([PAYLOADS[0]], PAYLOADS[0])
    bench.device.gates.open("wait_in")
    assert bench.outcomes() == list(promised.outcomes)
    assert bench.device.overlaps == []


def test_a_copy_over_what_another_still_reads_or_writes_is_seen(bench: Bench) -> None:
    bench.open("wait_in")
    bench.device.promises = True
    bench.submit(HOST, DEVICE, [(bench.records[0], 0, 5)])
    assert bench.device.gates.reached["wait_in"].wait(30)
    (started,) = bench.tiers.answers.started
    assert started.promise() is not None
    bench.submit(DEVICE, HOST, [(bench.records[1], 1, 0), (bench.records[5], 5, 1)])
    assert bench.outcomes() == [OK, OK]
    assert bench.device.overlaps == [("out", 1)]
    bench.device.gates.open("wait_in")
    assert bench.outcomes() == [OK]
    bench.submit(DEVICE, HOST, [(bench.records[1], 1, 0)])
    assert bench.outcomes() == [OK]
    assert bench.device.overlaps == [("out", 1)]


def test_copies_end_though_no_step_comes_behind_them(bench: Bench) -> None:
    bench.open("wait_in")
    bench.device.promises = True
    bench.tiers.host.view(0)[:] = PAYLOADS[0]
    bench.submit(HOST, DEVICE, [(bench.records[0], 0, 5)])
    assert bench.device.gates.reached["wait_in"].wait(30)
    (started,) = bench.tiers.answers.started
    assert started.promise() is not None
    bench.device.gates.open("wait_in")
    assert bench.outcomes() == [OK]
    assert bench.extents()[5] == PAYLOADS[0]


def test_nothing_is_promised_of_copies_that_cannot_say_or_were_not_started(bench: Bench) -> None:
    bench.open()
    bench.submit(HOST, DEVICE, [(bench.records[0], 0, 0)])
    assert bench.outcomes() == [OK]
    bench.device.promises = True
    bench.device.failing = {("start", "in", 1)}
    bench.submit(HOST, DEVICE, [(bench.records[0], 0, 0)])
    assert bench.outcomes() == [IO_ERROR]
    bench.submit(DEVICE, HOST, [(bench.records[0], 0, 0)])
    assert bench.outcomes() == [OK]
    bench.device.promises = False
    assert [started.promise() for started in bench.tiers.answers.started] == [None, None]


# -- failures


@pytest.mark.parametrize("when", ["start", "wait"])
@pytest.mark.parametrize("way", ["in", "out"])
def test_copies_that_raise_fail_their_piece_alone(bench: Bench, way: str, when: str) -> None:
    bench.open(staging_blocks=4)
    bench.fill_device()
    if way == "in":
        bench.to_disk(bench.records[:4])
        moves = bench.fetches()
        bench.device.failing = {(when, "in", 1)}
        bench.submit(DISK, DEVICE, moves)
        assert bench.outcomes() == [OK, IO_ERROR, OK, OK]
        number = bench.submit(HOST, DEVICE, [(bench.records[4], 0, 4)])
    else:
        bench.device.failing = {(when, "out", 1)}
        bench.submit(DEVICE, DISK, bench.spills()[:6])
        assert bench.outcomes() == [OK, OK, IO_ERROR, IO_ERROR, OK, OK]
        assert len(bench.slots()) == 2
        number = bench.submit(DEVICE, HOST, [(bench.records[4], 4, 0)])
    assert bench.result().transfer_id == number


def test_a_block_that_does_not_arrive_fails_alone(bench: Bench) -> None:
    bench.open(staging_blocks=8)
    bench.fill_device()
    bench.device.bad_blocks = {1}
    bench.submit(DEVICE, DISK, bench.spills()[:4])
    assert bench.outcomes() == [OK, IO_ERROR, OK, OK]
    bench.submit(DEVICE, HOST, [(r, i, i) for i, r in enumerate(bench.records[:3])])
    assert bench.outcomes() == [OK, IO_ERROR, OK]
    bench.submit(DEVICE, HOST, [(bench.records[0], 0, BLOCKS), (bench.records[2], 2, 2)])
    assert bench.outcomes() == [IO_ERROR, OK]
    bench.device.bad_blocks = {0, 2, 3}
    bench.submit(DEVICE, DISK, [bench.spills()[i] for i in (0, 2)])
    assert bench.outcomes() == [IO_ERROR, IO_ERROR]


def test_what_the_disk_says_of_a_block_is_its_outcome(bench: Bench) -> None:
    bench.open(staging_blocks=8)
    bench.to_disk(bench.records[:5])
    moves = bench.fetches()
    (file,) = Path(bench.tiers.directory.path).rglob("*.kv")
    data = file.read_bytes()
    at = data.index(PAYLOADS[1])
    with file.open("r+b") as segment:
        segment.seek(at + 7)
        segment.write(bytes([data[at + 7] ^ 1]))
    other = (bench.records[2], moves[3][1], 2)  # the slot of another block
    bench.device.bad_blocks = {4}
    bench.submit(DISK, DEVICE, [moves[0], moves[1], other, moves[3], moves[4]])
    assert bench.outcomes() == [OK, CORRUPT, MISSING, OK, IO_ERROR]
    assert bench.extents()[:5] == [PAYLOADS[0], UNTOUCHED, UNTOUCHED, PAYLOADS[3], UNTOUCHED]


@pytest.mark.parametrize("way", [(DISK, DEVICE), (DEVICE, DISK), (HOST, DEVICE), (DEVICE, HOST)])
def test_an_empty_transfer_is_answered(bench: Bench, way: tuple[Tier, Tier]) -> None:
    bench.open()
    number = bench.submit(*way, [])
    result = bench.result()
    assert (result.transfer_id, result.outcomes) == (number, ())


def test_without_a_disk_tier_the_store_refuses(bench: Bench) -> None:
    bench.open(disk=False, staging_blocks=2)
    bench.submit(DISK, DEVICE, [(r, 0, i) for i, r in enumerate(bench.records)])
    assert bench.outcomes() == [MISSING] * BLOCKS
    bench.submit(DEVICE, DISK, bench.spills())
    assert bench.outcomes() == [NO_ROOM] * BLOCKS


# -- the end


def test_closing_finishes_what_is_queued(bench: Bench) -> None:
    bench.open(staging_blocks=2)
    bench.fill_device()
    bench.submit(DEVICE, DISK, bench.spills())
    bench.submit(DEVICE, HOST, [(bench.records[0], 0, 0)])
    assert bench.tiers.mover.close(30) == 0
    results = sorted((bench.result() for _ in range(2)), key=lambda result: result.transfer_id)
    assert [result.outcomes for result in results] == [(OK,) * BLOCKS, (OK,)]
    bench.submit(DISK, DEVICE, [(bench.records[0], 0, 0)])
    assert bench.outcomes() == [IO_ERROR]


def test_closing_answers_what_the_disk_holds_up(bench: Bench) -> None:
    bench.open("disk_put_half", staging_blocks=4)
    bench.fill_device()
    half = bench.submit(DEVICE, DISK, bench.spills()[:6])
    queued = bench.submit(DEVICE, DISK, bench.spills()[6:])
    assert bench.tiers.gates.reached["disk_put_half"].wait(30)
    assert bench.tiers.mover.close(0) == 2
    results = {result.transfer_id: result for result in (bench.result(), bench.result())}
    assert results[half].outcomes == results[queued].outcomes == (IO_ERROR,) * 6
    bench.tiers.gates.open("disk_put_half")


def test_closing_keeps_what_has_ended_of_a_transfer(bench: Bench) -> None:
    bench.open("wait_in", staging_blocks=2)
    bench.to_disk(bench.records[:3])
    number = bench.submit(DISK, DEVICE, bench.fetches())
    assert bench.device.gates.reached["wait_in"].wait(30)
    assert bench.tiers.mover.close(0) is None  # held in a copy, which is finished
    bench.device.gates.open("wait_in")
    assert bench.tiers.mover.close(0) == 1
    result = bench.result()
    assert (result.transfer_id, result.outcomes) == (number, (OK, IO_ERROR, IO_ERROR))
    assert bench.extents()[0] == PAYLOADS[0]
