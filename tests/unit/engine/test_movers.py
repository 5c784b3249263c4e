from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from sessionkv.engine.device_memory import copy_bytes
from sessionkv.engine.movers import HostArena
from sessionkv.types import MoveOutcome, Tier
from tests.builders.store import ROOT, block, payload
from tests.builders.tiers import BLOCK, Tiers

OK, IO_ERROR = MoveOutcome.OK, MoveOutcome.IO_ERROR
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path / "store")
    yield made
    made.close()


def odd_bytes() -> bytes:
    """Every 16-bit pattern's neighbours that a conversion would change: -0.0, NaNs, denormals."""
    halves = [0x8000, 0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x0001, 0x43DA, 0x7FFF, 0x3F80]
    data = struct.pack(f"<{len(halves)}H", *halves) + struct.pack("<dd", 1e-310, -0.0)
    return (data * (BLOCK // len(data) + 1))[:BLOCK]


def test_bytes_are_equal_through_every_hop(tiers: Tiers) -> None:
    record = block(ROOT, [1, 2, 3, 4])
    original = odd_bytes()
    tiers.pool.block_view(0)[:] = original
    hops = [(DEVICE, HOST, 0, 2), (HOST, DEVICE, 2, 1), (HOST, DISK, 2, -1)]
    for src, dst, a, b in hops:
        number = tiers.submit(src, dst, (record, a, b))
        assert tiers.result() == (number, (OK,))
    tiers.host.view(2)[:] = bytes(BLOCK)
    slot = tiers.find(record)
    for dst, target in ((HOST, 3), (DEVICE, 3)):
        number = tiers.submit(DISK, dst, (record, slot, target))
        assert tiers.result() == (number, (OK,))
    assert bytes(tiers.pool.block_view(1)) == original
    assert bytes(tiers.host.view(3)) == original
    assert bytes(tiers.pool.block_view(3)) == original
    assert bytes(tiers.pool.block_view(2)) == b"\xff" * BLOCK
    assert bytes(tiers.host.view(0)) == bytes(BLOCK)


def test_device_blocks_go_to_disk_without_passing_host(tiers: Tiers) -> None:
    record = block(ROOT, [1, 2, 3, 4])
    tiers.pool.block_view(2)[:] = payload(record)
    number = tiers.submit(DEVICE, DISK, (record, 2, -1))
    assert tiers.result() == (number, (OK,))
    number = tiers.submit(DISK, DEVICE, (record, tiers.find(record), 0))
    assert tiers.result() == (number, (OK,))
    assert bytes(tiers.pool.block_view(0)) == bytes(payload(record))


def test_a_copy_that_raises_is_an_outcome_and_the_thread_lives(tiers: Tiers) -> None:
    record = block(ROOT, [1])
    number = tiers.submit(DEVICE, HOST, (record, 0, 0), (record, 9, 1), (record, 1, 9))
    assert tiers.result() == (number, (OK, IO_ERROR, IO_ERROR))
    number = tiers.submit(DEVICE, DISK, (record, 9, -1))
    assert tiers.result() == (number, (IO_ERROR,))
    number = tiers.submit(HOST, DEVICE, (record, 0, 0))
    assert tiers.result() == (number, (OK,))


def test_fetches_pass_spills(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "store", "after_d2h")
    record = block(ROOT, [1])
    first = tiers.submit(DEVICE, HOST, (record, 0, 0))
    assert tiers.gates.reached["after_d2h"].wait(30)
    second = tiers.submit(DEVICE, HOST, (record, 1, 1))
    fetch = tiers.submit(HOST, DEVICE, (record, 3, 3))
    tiers.gates.open("after_d2h")
    assert [tiers.result()[0] for _ in range(3)] == [first, fetch, second]
    tiers.close()


def test_closing_answers_everything(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "store", "before_d2h")
    record = block(ROOT, [1])
    tiers.submit(DEVICE, HOST, (record, 0, 0))
    assert tiers.gates.reached["before_d2h"].wait(30)
    assert tiers.mover.close(0) is None  # held by the gate
    tiers.gates.open("before_d2h")
    assert tiers.result() == (1, (OK,))
    tiers.submit(DEVICE, HOST, (record, 0, 0))
    assert tiers.result() == (2, (IO_ERROR,))
    tiers.close()


def test_copies_check_their_lengths_and_arenas_their_ids() -> None:
    with pytest.raises(ValueError, match="3 bytes do not fit 4"):
        copy_bytes(memoryview(bytearray(4)), memoryview(bytearray(3)))
    arena = HostArena(2, 8)
    arena.view(1)[:] = b"12345678"
    assert (bytes(arena.view(0)), bytes(arena.view(1))) == (bytes(8), b"12345678")
    for block_id in (-1, 2):
        with pytest.raises(IndexError):
            arena.view(block_id)
    with pytest.raises(IndexError):
        HostArena(0, 8).view(0)
